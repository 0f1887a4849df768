import gzip
from base64 import b64decode

import pytest

from harness.report.packing import compact, packed


def test_packed_text_comes_back_and_is_the_same_every_time() -> None:
    text = "</script> µs " * 100
    assert gzip.decompress(b64decode(packed(text))).decode() == text
    assert packed(text) == packed(text)
    assert "<" not in packed(text)


def test_numbers_are_rounded_and_whole_ones_are_not() -> None:
    assert compact({"a": [1.23456789e-7, (0.1,)], "b": 1234567890, "c": None, "d": True, "e": "1.23456789"}) == (
        '{"a":[1.2346e-07,[0.1]],"b":1234567890,"c":null,"d":true,"e":"1.23456789"}'
    )
    with pytest.raises(ValueError, match="not JSON compliant"):
        compact([float("nan")])

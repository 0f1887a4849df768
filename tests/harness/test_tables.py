from pathlib import Path

from harness import tables
from harness.comparison import compare
from harness.store import Store
from harness.tables import Tone
from tests.harness import sample


def test_each_variant_s_set_up_is_told_where_it_is_not_the_default(tmp_path: Path) -> None:
    sample.write_gpu_history(tmp_path, rounds=1)
    table = tables.recipe_table(compare(Store(tmp_path).load(sample.GPU_MACHINE), folder=tmp_path))
    assert [column.heading for column in table.columns[-2:]] == ["streams", "fusion"]
    told = {row[0].text: [cell.text for cell in row[-2:]] for row in table.rows}
    assert told["kitsune_trainstep_amp"] == told["eager_amp"] == ["—", "—"]
    assert told["kitsune_trainstep_one_stream_amp"] == ["1", "—"]
    assert told["kitsune_trainstep_unfused_amp"] == ["1", "off"]


def test_kitsune_stands_out_unless_something_is_switched_off() -> None:
    assert tables.variant_tone("kitsune_dropin_fp32") is Tone.STRONG
    assert tables.variant_tone("kitsune_trainstep_unfused_fp32") is Tone.FAINT
    assert tables.variant_tone("eager_fp32") is Tone.PLAIN

from harness.report import markup
from harness.selection import Case
from harness.tables import Cell, Column, Subject, Table

CASE = Case("a b", "a b", 8, "cuda")
SUBJECT = Subject(CASE, "kitsune_<x>_amp")
TABLE = Table((Column("model", "which"),), ((Cell("a b"),),), (SUBJECT,))


def test_a_row_is_found_by_its_link_and_its_model() -> None:
    told = markup.table(TABLE, anchor="row", commands={(CASE, SUBJECT.variant): "run <it>"})
    assert 'id="row-a%20b-cuda-kitsune_%3Cx%3E_amp"' in told
    assert 'href="#row-a%2520b-cuda-kitsune_%253Cx%253E_amp"' in told, "a browser decodes it once"
    assert 'data-models="[&quot;a b&quot;]"' in told
    assert '<code class="command">run &lt;it&gt;</code>' in told


def test_a_row_without_a_command_keeps_the_columns() -> None:
    told = markup.table(TABLE, anchor="row", commands={})
    assert told.count("<th ") == told.count("<td") == 2
    assert "<details>" not in told


def test_a_table_without_subjects_is_plain() -> None:
    told = markup.table(Table(TABLE.columns, TABLE.rows))
    assert "data-models" not in told
    assert " id=" not in told
    assert "again" not in told

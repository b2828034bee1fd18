"""The survey of model types: the page is what the data gives, and nothing in the data is wrong."""

from __future__ import annotations

from tools import survey_models


def test_the_page_is_what_the_data_gives():
    assert survey_models.PAGE.read_text() == survey_models.page(survey_models.load())


def test_enough_types_ran_and_none_is_wrong():
    rows = survey_models.load()["rows"].values()
    wrong = {row["type"] for row in rows if survey_models.verdict(row) == "wrong"}
    assert not wrong
    assert sum(row["status"] == "run" for row in rows) >= 150


def test_the_comparison_would_notice_a_wrong_attention():
    rows = [row for row in survey_models.load()["rows"].values() if survey_models.verdict(row).startswith("on kernel")]
    noticed = [row for row in rows if (row.get("noticed") or 0.0) > survey_models.NOTICED]
    assert len(noticed) >= 0.9 * len(rows) > 100

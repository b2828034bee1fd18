"""The survey of model types: the page is what the data gives, nothing in the data is wrong, and a sample of it is
tried anew."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tools import survey_models

# Every route and every kind of attention: window, chunks, softcap, sinks, latent attention, selected keys, learned bias,
# encoders, vision, audio, cross attention, own attention.
SAMPLE = """
    albert apertus axk2 bart bert big_bird bigbird_pegasus biogpt bloom bridgetower canary clip cohere2 data2vec-audio
    deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 distilbert electra falcon gemma gemma2 gemma3 gemma3_text gemma4_text
    glm glm4v gpt2 gpt_neox gpt_oss granite hubert hy_v4 idefics3 llama llama4_text mamba mistral mixtral modernbert
    moonshine nemotron nllb-moe olmo2 olmo3 opt paligemma phi3 qwen2 qwen2_5_vl qwen3 qwen3_moe roberta siglip smollm3
    speech_to_text starcoder2 t5 vit wav2vec2 whisper
""".split()


def test_the_page_is_what_the_data_gives():
    assert survey_models.PAGE.read_text() == survey_models.page(survey_models.load())


def test_enough_types_ran_and_none_is_wrong():
    rows = survey_models.load()["rows"].values()
    assert not {row["type"]: row for row in rows if survey_models.verdict(row) in ("wrong", "raised", "not comparable")}
    assert sum(row["status"] == "run" for row in rows) >= 300
    assert sum(survey_models.verdict(row).startswith("on kernel") for row in rows) >= 250


def test_the_comparison_would_notice_a_wrong_attention():
    rows = [row for row in survey_models.load()["rows"].values() if survey_models.verdict(row).startswith("on kernel")]
    noticed = [row for row in rows if (row.get("noticed") or 0.0) > survey_models.NOTICED]
    assert len(noticed) >= 0.9 * len(rows) > 100


@pytest.mark.slow
def test_a_sample_of_types_is_as_the_data_says():
    """Routes with their counts, tokens, and an error within the tolerance; in two processes beside this one."""
    known = survey_models.load()["rows"]
    assert len(SAMPLE) >= 40 and all(known[name]["status"] in ("run", "refused") for name in SAMPLE)
    with ThreadPoolExecutor(2) as pool:
        halves = pool.map(lambda half: list(survey_models.run_types(half)), (SAMPLE[::2], SAMPLE[1::2]))
        found = {row["type"]: row for half in halves for row in half}
    assert found.keys() == set(SAMPLE)
    for name, row in found.items():
        for what in ("status", "inputs", "routes", "masks", "tokens", "reference"):
            assert row.get(what) == known[name].get(what), (name, what, row)
        assert survey_models.verdict(row) == survey_models.verdict(known[name]), row

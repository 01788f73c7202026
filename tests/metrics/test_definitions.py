import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kvctl.metrics.definitions import METRICS, MetricKind, metrics_table_markdown, token_buckets

PAGE = Path(__file__).parent.parent / "data" / "top" / "vllm_under_load_1.txt"
# What vLLM exposes for features that kvctl has not: connectors, multimodal input, sleep mode, flop estimates.
NOT_HERE = re.compile(
    r"vllm:(external_|mm_cache|engine_sleep|estimated_|lora_|spec_decode|corrupted|kv_block|watermark)"
)


def vllm_families():
    text = PAGE.read_text()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    return {name: family for name, family in families.items() if name.startswith("vllm:") and family.samples}


def test_every_family_of_a_vllm_page_is_here_with_its_kind_and_labels():
    compared = 0
    for name, family in vllm_families().items():
        if NOT_HERE.match(name) or name.endswith("_created"):
            continue
        definition = METRICS[name]
        assert definition.kind.value == family.type
        own = {"le", "model_name", "engine"} | set(definition.labels)
        theirs = {label for sample in family.samples for label in sample.labels}
        if name.endswith("_info"):
            continue  # the labels of an info family are the configuration of that engine
        if name == "vllm:admission_rejections":
            theirs |= {"engine"}  # vLLM leaves it out of this one
        assert theirs - {"le"} == own - {"le"}, name
        compared += 1
    assert compared > 25


def test_buckets_are_those_of_a_vllm_page():
    compared = 0
    for name, family in vllm_families().items():
        if family.type != "histogram" or name not in METRICS:
            continue
        bounds = sorted({float(sample.labels["le"]) for sample in family.samples if "le" in sample.labels})
        definition = METRICS[name]
        ours = definition.buckets
        if ours is None:
            ours = token_buckets(int(2.1 * bounds[-2]))  # the model's length is not on the page: 1-2-5 up to it
        assert [*ours[: len(bounds) - 1], float("inf")] == bounds, name
        compared += 1
    assert compared > 10


def test_token_buckets_end_at_the_models_length():
    assert token_buckets(100) == (1, 2, 5, 10, 20, 50, 100)
    assert token_buckets(99) == (1, 2, 5, 10, 20, 50)
    assert token_buckets(131_072)[-2:] == (50_000, 100_000)


def test_names_and_label_values_are_in_order():
    for name, definition in METRICS.items():
        assert name == definition.name
        assert re.fullmatch(r"(vllm|kvctl):[a-z0-9_]+", name)
        assert definition.help.endswith(".")
        assert len(set(definition.label_values)) == len(definition.label_values)
        assert not definition.label_values or len(definition.labels) == 1
        assert (definition.kind is MetricKind.HISTOGRAM) or definition.buckets is None
        if definition.buckets:
            assert list(definition.buckets) == sorted(set(definition.buckets))
        if definition.kind is MetricKind.COUNTER:
            assert not name.endswith("_total")


def test_readme_table_has_a_row_for_every_family():
    lines = metrics_table_markdown().splitlines()
    assert len(lines) == len(METRICS) + 2
    assert {line.count("|") for line in lines} == {6}
    assert "`vllm:request_success_total`" in metrics_table_markdown()

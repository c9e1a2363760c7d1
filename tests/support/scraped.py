"""What a scrape says, as numbers. In: the text of /metrics. Out: each sample by its name and labels;
what changed between two scrapes. Callers: tests of the metrics."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, ...], float]  # by name and "label=value", without the model's name


def read_samples(text: str) -> Samples:
    return {
        (
            sample.name,
            *(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "model_name"),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def counts_changed(before: Samples, after: Samples) -> Samples:
    """Every counter that is not what it was, and by how much; of a histogram the observations."""
    return {
        key: value - before.get(key, 0)
        for key, value in after.items()
        if key[0].endswith(("_total", "_count")) and value != before.get(key, 0)
    }

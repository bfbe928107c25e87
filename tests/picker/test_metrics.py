"""Series have the reference's names, and clients cannot make them grow without bound."""

from __future__ import annotations

from picker.metrics import BoundedLabels, PickerMetrics


def test_two_pickers_in_one_process_do_not_share_series() -> None:
    """No process-global registry."""
    first, second = PickerMetrics(), PickerMetrics()
    first.request_total.labels("m", "m", "", "0").inc()
    assert b'model_name="m"' in first.render()
    assert b'model_name="m"' not in second.render()


def test_label_values_beyond_the_cap_become_other() -> None:
    """Known ones and the empty one stay."""
    labels = BoundedLabels(limit=2)
    assert [labels.admit(v) for v in ("a", "b", "c", "", "a", "d")] == [
        *("a", "b", "other", "", "a", "other")
    ]


def test_models_share_one_cap() -> None:
    """A client that invents model names costs a thousand series at most."""
    metrics = PickerMetrics()
    seen = {metrics.request_labels(f"m{i}", f"t{i}") for i in range(2000)}
    names = {label for row in seen for label in row[:2]}
    assert len(names) == 1001
    assert "other" in names


def test_series_carry_the_reference_names() -> None:
    """What dashboards ask for."""
    page = PickerMetrics().render().decode()
    for name in (
        "llm_d_epp_request_total",
        "llm_d_epp_request_error_total",
        "llm_d_epp_request_running",
        "llm_d_epp_scheduler_e2e_duration_seconds",
        "llm_d_epp_scheduler_attempts_total",
        "llm_d_epp_plugin_duration_seconds",
        "llm_d_epp_prefix_indexer_hit_ratio",
        "llm_d_epp_datalayer_poll_errors_total",
        "llm_d_epp_info",
    ):
        assert f"# TYPE {name} " in page

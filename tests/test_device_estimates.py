"""What is estimated for an H100 is what `benchmarks/results/gpu.json` has of one."""

import pytest
from integration_cases.sweeps import swept

import estimates
import gpu
import remat
from page_tables import reading

ESTIMATED = {row["model"]: row for row in reading.results("estimates")["rows"]}


@pytest.mark.parametrize("name", swept(gpu.MODELS, []))
def test_a_dry_peak_is_within_a_tenth_of_what_was_measured(name):
    graph = estimates.dry(name).as_autograd()
    peak = estimates.stored_peak(graph)
    assert peak == pytest.approx(estimates.plain_steps()[name]["plain_peak_bytes"], rel=0.1)
    assert peak == ESTIMATED[name]["peak_bytes"]
    assert graph.time == pytest.approx(ESTIMATED[name]["seconds"], rel=0.01)


def test_the_rates_of_the_device_are_those_that_were_fitted():
    fitted, spec = reading.results("estimates")["fitted"], remat.DEVICES["h100"]
    rates = (
        spec.flops_per_second / estimates.SHEET.flops_per_second,
        spec.half_flops_per_second / estimates.SHEET.half_flops_per_second,
        spec.bytes_per_second / estimates.SHEET.bytes_per_second,
        spec.convolution_flops_per_second,
        spec.launch_seconds,
    )
    share, convolutions, launch = fitted.values()
    assert rates == pytest.approx((share, share, share, convolutions, launch), rel=0.005)


def test_a_fit_finds_the_figures_that_steps_were_made_of():
    kinds = {"products": 0, "half": 1, "convolutions": 2, "moved": 3}

    def step(kind, amount):
        parts = [[0.0] * 3 for _ in kinds]
        parts[kinds[kind]] = [amount] * 3
        parts[kinds["moved"]] = [max(1.0, part) for part in parts[kinds["moved"]]]
        return estimates.Work(*parts)

    work = {kind: step(kind, 10.0 ** (9 + 2 * (kind != "moved"))) for kind in kinds}
    seconds = {kind: part.seconds(0.5, 2e14, 1e-5) for kind, part in work.items()}
    assert estimates.fit(work, seconds) == pytest.approx((0.5, 2e14, 1e-5), rel=1e-3)

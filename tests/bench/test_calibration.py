"""The client measures itself before it measures a server."""

from kvctl.bench.calibration import calibrate


def test_a_calibration_compares_this_client_with_the_servers_own_log():
    found = calibrate(4)
    assert found.concurrency == 4
    assert found.events_per_s > 50
    assert abs(found.ttft_error_p50_s) < 0.002  # both clocks are one, and the kernel notes the arrivals
    assert found.ttft_truth_p50_s > 0.049
    told = found.as_json()
    assert told["ttft_error_ms"]["p99"] is not None
    assert told["cpu_us_per_event"] > 0

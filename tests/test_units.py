import pytest

from kvctl.errors import ConfigError
from kvctl.units import format_bytes, format_count, format_seconds, parse_bytes, parse_count, parse_seconds


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12.3GiB", int(12.3 * 2**30)),
        ("800MB", 800_000_000),
        ("4g", 4 * 2**30),
        ("1024", 1024),
        (" 2 TiB ", 2**41),
        ("0", 0),
    ],
)
def test_bytes_are_read_as_people_write_them(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "12 parsecs", "1e999", "nan", "0x10", "1,000"])
def test_what_is_no_amount_of_memory_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="amount of memory"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "expected"), [("500ms", 0.5), ("2m", 120), ("30", 30), ("1.5h", 5400), ("20us", 2e-5)]
)
def test_durations_are_read_as_people_write_them(text: str, expected: float) -> None:
    assert parse_seconds(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "expected"), [("4096", 4096), ("32k", 32_000), ("32K", 32_768), ("1M", 2**20), ("1.5k", 1500), ("-1", -1)]
)
def test_counts_tell_thousands_from_1024s(text: str, expected: int) -> None:
    assert parse_count(text) == expected


@pytest.mark.parametrize("text", ["1.5", "k", "3x", "", "1.00001k"])
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="whole number"):
        parse_count(text)


def test_formats() -> None:
    assert [format_bytes(n) for n in (0, 512, 57_344, 1_342_177_280, 2**40)] == [
        "0 B",
        "512 B",
        "56.0 KiB",
        "1.25 GiB",
        "1.00 TiB",
    ]
    assert [format_seconds(s) for s in (2e-5, 0.0009996, 0.0035, 0.9996, 1.2, 125, 7300)] == [
        "20 us",
        "1 ms",
        "3.5 ms",
        "1 s",
        "1.2 s",
        "2 min 5 s",
        "2 h 1 min",
    ]
    assert format_count(57_000) == "57,000"

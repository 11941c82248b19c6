import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.errors import SpecError
from simulator.specs.units import GIB, Dimension, Dtype, dimension_of, exact_quantity, format_quantity, parse_quantity


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("450 GB/s", Dimension.BYTES_PER_SECOND, 450_000_000_000),
        ("400 Gb/s", Dimension.BYTES_PER_SECOND, 50_000_000_000),
        ("8 kb/s", Dimension.BYTES_PER_SECOND, 1_000),
        ("1 MiB/s", Dimension.BYTES_PER_SECOND, 1_048_576),
        ("80 GiB", Dimension.BYTES, 85_899_345_920),
        ("80 GB", Dimension.BYTES, 80_000_000_000),
        ("1.5 TiB", Dimension.BYTES, 1_649_267_441_664),
        ("1_024 B", Dimension.BYTES, 1024),
        ("2 min", Dimension.SECONDS, 120),
        ("1.5 h", Dimension.SECONDS, 5400),
        ("250ms", Dimension.SECONDS, 0.25),
        (" -3e1 s ", Dimension.SECONDS, -30),
        ("989 TFLOP/s", Dimension.FLOPS_PER_SECOND, 989_000_000_000_000),
        ("5 FLOP/s", Dimension.FLOPS_PER_SECOND, 5),
    ],
)
def test_quantities_by_hand(text, dimension, value):
    assert parse_quantity(text, dimension) == value


def test_microseconds_are_millionths():
    assert parse_quantity("1.9 us", Dimension.SECONDS) == pytest.approx(0.0000019, rel=1e-15)


@pytest.mark.parametrize(
    "text",
    [
        "450",
        "GB/s",
        "450 GB",
        "450 gb/s",
        "4 5 GB/s",
        "450 GB/s each",
        "",
        "one GB/s",
        "1__0 GB/s",
        "1_ GB/s",
        "nan GB/s",
    ],
)
def test_a_text_that_is_no_rate_is_refused_with_the_units_that_are(text):
    with pytest.raises(SpecError, match=r"must be a number and one of B/s, kB/s.* as in \"2 B/s\", got") as caught:
        parse_quantity(text, Dimension.BYTES_PER_SECOND)
    assert str(caught.value).endswith(f'got "{text}"')


def test_a_number_beyond_the_largest_float_is_refused():
    with pytest.raises(SpecError, match='must be a finite number, got "1e999 s"'):
        parse_quantity("1e999 s", Dimension.SECONDS)


@pytest.mark.parametrize(
    ("field", "dimension"),
    [
        ("latency_seconds", Dimension.SECONDS),
        ("memory_bytes", Dimension.BYTES),
        ("bandwidth_bytes_per_second", Dimension.BYTES_PER_SECOND),
        ("bf16_flops_per_second", Dimension.FLOPS_PER_SECOND),
        ("seconds", Dimension.SECONDS),
        ("num_nodes", None),
        ("within_ratio", None),
        ("num_flops", None),
        ("megabytes", None),
    ],
)
def test_the_end_of_a_name_tells_what_a_field_measures(field, dimension):
    assert dimension_of(field) == dimension


@pytest.mark.parametrize(
    ("value", "dimension", "text"),
    [
        (0.0012345, Dimension.SECONDS, "1.234 ms"),
        (2.5e-9, Dimension.SECONDS, "2.5 ns"),
        (90.0, Dimension.SECONDS, "90 s"),
        (0.0, Dimension.SECONDS, "0 ns"),
        (143_771 * 2**20, Dimension.BYTES, "140.4 GiB"),
        (330e9, Dimension.BYTES_PER_SECOND, "330 GB/s"),
        (989e12, Dimension.FLOPS_PER_SECOND, "989 TFLOP/s"),
    ],
)
def test_printed_quantities_by_hand(value, dimension, text):
    assert format_quantity(value, dimension) == text


@pytest.mark.parametrize(
    ("value", "dimension", "text"),
    [
        (80 * GIB, Dimension.BYTES, "80 GiB"),
        (143_771 * 2**20, Dimension.BYTES, "143771 MiB"),
        (4.8e12, Dimension.BYTES_PER_SECOND, "4.8 TB/s"),
        (13e-6, Dimension.SECONDS, "13 us"),
        (0.0, Dimension.SECONDS, "0 s"),
        (67e12, Dimension.FLOPS_PER_SECOND, "67 TFLOP/s"),
    ],
)
def test_exact_quantities_take_the_unit_with_the_fewest_digits(value, dimension, text):
    assert exact_quantity(value, dimension) == text


@given(value=st.floats(0, 1e30), dimension=st.sampled_from(Dimension))
def test_exact_quantities_are_exact(value, dimension):
    assert parse_quantity(exact_quantity(value, dimension), dimension) == value


@given(value=st.floats(1e-9, 1e18), dimension=st.sampled_from(Dimension))
def test_printed_quantities_are_right_to_four_digits(value, dimension):
    assert parse_quantity(format_quantity(value, dimension), dimension) == pytest.approx(value, rel=5.1e-4)


def test_bytes_of_number_formats():
    assert {dtype.value: dtype.num_bytes for dtype in Dtype} == {"fp32": 4, "bf16": 2}

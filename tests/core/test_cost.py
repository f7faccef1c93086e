"""The cost model learns, stays sane, and errs to the safe side."""

import random

import pytest

from kvtrio.core.cost import SLOW, CostModel, Load


def truth(
    load,
    base=0.004,
    token=0.0003,
    context=2e-8,
    row=0.001,
    row_context=4e-8,
    adapter=0.002,
    chunk=0.01,
):
    """Seconds of a made-up machine."""
    return (
        base
        + token * load.num_prefill_tokens
        + context * load.prefill_context
        + row * load.num_decode_rows
        + row_context * load.decode_context
        + adapter * load.num_adapters
        + chunk * load.num_prefill_chunks
    )


def some_load(rng):
    load = Load(num_adapters=rng.randrange(3))
    for _ in range(rng.randrange(5)):
        load = load.plus_row(rng.randrange(4000))
    if rng.random() < 0.7:
        load = load.plus_chunk(rng.randrange(4000), rng.randrange(1, 300))
    return load


def test_it_learns_a_machine():
    """After some hundred varied steps predictions are within a tenth, noise or not."""
    rng, model = random.Random(1), CostModel()
    for _ in range(400):
        load = some_load(rng)
        model.observe(load, truth(load) * rng.uniform(0.95, 1.05))
    for _ in range(50):
        load = some_load(rng)
        assert model.predict(load) / model.margin == pytest.approx(truth(load), rel=0.15, abs=1e-3)


def test_no_coefficient_is_ever_negative():
    """Whatever is measured, even nonsense."""
    rng, model = random.Random(2), CostModel()
    for _ in range(500):
        model.observe(some_load(rng), rng.choice([1e-9, 1e-6, 0.5, 10.0]))
        assert min(model.coefficients().values()) >= 0.0


def test_constant_load_winds_nothing_up():
    """After 20,000 equal steps a different load is still predicted within sane bounds."""
    model = CostModel()
    row = Load().plus_row(500)
    for _ in range(20_000):
        model.observe(row, truth(row))
    assert model.predict(row) == pytest.approx(truth(row), rel=0.05)
    big = row.plus_chunk(0, 256)
    slowest = sum(w * f for w, f in zip(SLOW, big.features(), strict=True))
    assert truth(big) * 0.2 < model.predict(big) < 3 * slowest


def test_a_machine_that_changes_under_constant_load_is_followed():
    """The fit takes few of many equal steps, and enough of them to see that they got slower."""
    model, row = CostModel(), Load().plus_row(500)
    for factor in (1.0, 1.3, 0.8):
        for _ in range(1000):
            model.observe(row, factor * truth(row))
        assert model.expect(row) == pytest.approx(factor * truth(row), rel=0.05)


def test_what_was_learned_is_not_forgotten_for_want_of_practice():
    """After thousands of steps of decoding alone, a prompt's cost is still known."""
    rng, model = random.Random(5), CostModel()
    for _ in range(500):
        load = some_load(rng)
        model.observe(load, truth(load))
    for _ in range(5000):
        row = Load().plus_row(rng.randrange(4000))
        model.observe(row, truth(row))
    big = Load().plus_row(100).plus_chunk(500, 200)
    assert model.predict(big) == pytest.approx(truth(big), rel=0.2)


def test_what_was_never_measured_is_as_fast_as_the_rest():
    """After short prompts on a fast machine a long one is not thought to take minutes, and never
    less than it takes."""
    rng, model = random.Random(7), CostModel()

    def fast(load):
        return 0.02 * truth(load)

    for _ in range(200):
        load = Load().plus_row(rng.randrange(300)).plus_chunk(0, rng.randrange(20, 200))
        model.observe(load, fast(load))
    long = Load().plus_chunk(15_000, 1000)
    assert fast(long) < model.predict(long) < 30 * fast(long)
    slow_s = sum(w * f for w, f in zip(SLOW, long.features(), strict=True))
    assert model.predict(long) < 0.05 * slow_s


def test_the_first_step_is_planned_small():
    """Before any measurement the prior lets little prefill into 100 ms."""
    assert CostModel().most_tokens(Load().plus_row(10), 0, 512, 0.1) <= 32


def test_noise_widens_the_margin():
    """With steps that take up to twice the mean, nine in ten keep to the prediction."""
    rng, model = random.Random(3), CostModel()
    kept = 0
    for number in range(600):
        load = some_load(rng)
        seconds = truth(load) * rng.uniform(0.6, 1.8)
        kept += number >= 100 and seconds <= model.predict(load)
        model.observe(load, seconds)
    assert kept > 0.85 * 500


def test_most_tokens_is_the_most():
    """One token more would exceed the time, one less would waste it."""
    rng, model = random.Random(4), CostModel()
    for _ in range(200):
        load = some_load(rng)
        model.observe(load, truth(load))
    load = Load().plus_row(100)
    num = model.most_tokens(load, 1000, 10_000, 0.1)
    assert model.predict(load.plus_chunk(1000, num)) <= 0.1
    assert model.predict(load.plus_chunk(1000, num + 1)) > 0.1


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0.0, -1.0])
def test_nonsense_teaches_nothing(seconds):
    """A clock that was set, or worse, leaves predictions as they were."""
    rng, model = random.Random(6), CostModel()
    for _ in range(200):
        load = some_load(rng)
        model.observe(load, truth(load))
    before = model.predict(Load().plus_chunk(0, 100))
    model.observe(some_load(rng), seconds)
    assert model.predict(Load().plus_chunk(0, 100)) == before

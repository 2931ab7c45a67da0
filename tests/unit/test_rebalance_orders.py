"""When a rebalance is due, and how long what it moves is expected to be of use."""

from moesaic.engine.rebalance.orders import Order, Trigger


def test_steps_or_requests_make_a_rebalance_due() -> None:
    by_steps, by_requests = Trigger(10, None, num_steps=9), Trigger(10, 5, num_steps=100)
    assert not by_steps.is_due(1000) and not by_requests.is_due(4) and by_requests.is_due(5)
    by_steps.num_steps += 1
    assert by_steps.is_due(0)
    by_requests.restart(5)
    assert not by_requests.is_due(9) and by_requests.is_due(10)


def test_the_horizon_of_requests_is_known_before_the_first_rebalance() -> None:
    """Else a dry run would tell that nothing pays, as there were no steps until the next one."""
    trigger = Trigger(1000, 40)
    assert trigger.horizon(0) == 1, "nothing has been computed yet"
    trigger.num_steps = 300
    assert trigger.horizon(20) == 600
    trigger.restart(20)
    assert trigger.horizon(20) == 600, "as before it"
    trigger.num_steps = 100
    assert trigger.horizon(40) == 400
    assert Trigger(1000, None, num_steps=3).horizon(7) == 1000


def test_orders_grow_with_their_number() -> None:
    later = Order(4)
    assert Order(3, by_operator=True, dry_run=True).encode() < later.encode()
    assert Order.decode(Order(3, True, False).encode()) == Order(3, True, False)

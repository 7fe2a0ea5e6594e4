import pytest
from pool import Ranks


@pytest.fixture(scope="session")
def ranks():
    """ranks(n) has n processes over gloo. ranks(n).run(f, *args) calls f(*args) on all of them."""
    pools: dict[int, Ranks] = {}
    yield lambda size: pools.setdefault(size, Ranks(size))
    for pool in pools.values():
        pool.stop()

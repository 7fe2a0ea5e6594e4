import pytest
from pool import Ranks


@pytest.fixture(scope="session")
def ranks():
    """ranks(n) has n processes. ranks(n).run(f, *args) calls f(*args) on all of them."""
    pools: dict[tuple, Ranks] = {}
    yield lambda *kind: pools.setdefault(kind, Ranks(*kind))
    for pool in pools.values():
        pool.stop()

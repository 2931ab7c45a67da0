from tests.oracle import CASES
def test_x(): assert CASES

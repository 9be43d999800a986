import numpy as np
import pytest
from jaxtyping import Float, jaxtyped

from tests.type_checker import check


def function_of(size: type):
    """Return a function inside another one, as the import hook decorates it."""

    @jaxtyped(typechecker=check)
    def inner(array: size) -> size:
        return array

    return inner


def test_a_remembered_check_is_of_the_same_types():
    vector, matrix = Float[np.ndarray, "n"], Float[np.ndarray, "n n"]
    for size, good, bad in 2 * [(vector, np.ones(2), np.ones((2, 2))), (matrix, np.ones((2, 2)), np.ones((2, 3)))]:
        assert function_of(size)(good) is good
        with pytest.raises(Exception, match="Type-check error"):
            function_of(size)(bad)

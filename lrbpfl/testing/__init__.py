"""Whether an algorithm or an engine, ours or anybody's, keeps the promises that runs rely on; for tests of either."""

from lrbpfl.testing.contracts import check_algorithm as check_algorithm
from lrbpfl.testing.engines import check_engine as check_engine

"""`python -m kvlab.testing` prints the table of parts that refuse each other."""

from kvlab.testing.contract import SHAPE
from kvlab.testing.examples import table

if __name__ == "__main__":
    print(table(SHAPE))

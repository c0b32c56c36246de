"""mutmut's command line with string literals left alone: a changed message is not a wrong result.

`make mutate` runs it and then prints the survivors; `python tools/mutate.py show NAME` prints one of them. Which files
are mutated and which tests must notice stands in pyproject.toml, [tool.mutmut].
"""

from mutmut.__main__ import cli
from mutmut.mutation import file_mutation, mutators

file_mutation.mutation_operators = [
    (node, operator) for node, operator in mutators.mutation_operators if operator is not mutators.operator_string
]

if __name__ == "__main__":
    cli()

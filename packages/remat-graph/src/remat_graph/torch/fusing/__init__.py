"""Groups of operators that are compiled to one: found, compiled, and put in a program."""

"""The minimal peak of a graph: what is found, and what is proved.

`programs` lowers a peak by the programs of `refine`, where single steps (`search.descent`) find no
more; `budget` takes the proofs of `bounds`, both searches in turn, and says what came of them.
"""

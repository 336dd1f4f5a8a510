"""`policyline doctor`: measures what it is given, then judges. Measuring and judging are apart.

`examine_*` measures and decides nothing; `*_lines` turns what was found into lines and does no I/O.
"""

"""`policyline doctor`: measures what it is given, then judges. Measuring and judging are apart.

`*_facts` modules measure and decide nothing; `*_lines` modules turn facts into lines and do no I/O.
"""

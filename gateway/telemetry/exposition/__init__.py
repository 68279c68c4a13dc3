"""Parsing, merging and encoding of metrics pages in Prometheus' text format, without I/O.

Concatenated pages are invalid: a family must have one HELP and one TYPE, and its samples must be adjacent.
The pages of several servers are therefore merged by family, as text: names, values and timestamps stay
unchanged (a client library would rename counters), and a `replica` label is added.

Pages are parsed strictly in the text format 0.0.4, the only one that Triton supports: one invalid line makes
Prometheus reject the whole merged page, so a page with such a line is left out.
"""

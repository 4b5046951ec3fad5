"""Statements of articles, tested: `kvlab claim FILE` runs an experiment and ends in a verdict on what somebody wrote.

The file is an experiment with a [claim] table:

[claim]
statement = "..."           what was said, as strong as it was said
source    = "..."           where, in words
holds_if  = "..."           what would show it, in words, written before the run
rule      = "all"           whether all of the tests that decide must hold, or "any" of them is enough
act       = {holds = "...", fails = "...", underpowered = "..."}      what to do then, written before the run
[[claim.test]]              one or more; `kind` says what is compared, see `KINDS` and the modules of that name
kind = "pair"

What a test looks at is a quantity that the claim says is larger than `more_than`. With an interval around it, the claim holds
if the interval lies above, does not hold if it lies below, and is underpowered otherwise. Where several tests decide, each has
its share of alpha, so all their intervals are right together.
"""

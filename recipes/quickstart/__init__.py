"""The quickstart task: additions a tiny model half knows how to work out, and a reward that makes it do so.

A supervised warm start teaches the model two ways of answering ``What is 472 + 815?``: to work the sum out in
writing, which is nearly always right, and to blurt the result, which is nearly always wrong. It leaves the model
blurting more often than not. GRPO with an exact-match reward then raises the worked answers until they are the rule.

So GRPO **elicits and sharpens** here a skill the warm start taught; it does not teach addition.
"""

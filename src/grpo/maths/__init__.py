"""The mathematics of GRPO: pure functions of tensors, each with its source and its shapes.

``group_advantages`` turns the rewards of a round into advantages; ``grpo_loss`` turns advantages and
log-probabilities into the number that is minimised. Import them from the modules of the same names.
"""

"""The mathematics of GRPO: pure functions of tensors, each with its source and its shapes.

``group_advantages`` turns the rewards of a round into advantages; ``token_weights`` says what each token of an
update counts; ``grpo_loss`` turns advantages and log-probabilities into the number that is minimised, and its
metrics are in ``loss_metrics``. Import them from the modules of the same names.
"""

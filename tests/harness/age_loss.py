"""A custom algorithm that weights tokens by their age: `learner.algorithm=tests.harness.age_loss:by_age`."""

from jaxroll.algorithms import registry
from jaxroll.algorithms.advantages import TokenLoss
from jaxroll.algorithms.registry import Algorithm


@registry.register("by_age")
def by_age(learner):
    """Weight every token's loss by its age in steps."""

    def token_loss(tokens):
        loss = -tokens.ages * tokens.advantage * tokens.logprob
        return TokenLoss(loss, tokens.ages > 1)

    return Algorithm(token_loss, multiple_of_advantage=True)

"""Operations on tensors: what the model and the step are made of. The lowest layer."""

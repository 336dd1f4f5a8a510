"""Publishing out of a running training: TRL and Trainer."""

"""Short problems with checkable answers, drawn from a seed; nothing is downloaded.

The hash of its prompt assigns every problem to training or to testing, so a model trained on one
half has never seen the other, whatever the seeds."""

"""Short problems with answers that can be checked, drawn from a seed: nothing is downloaded.

Every problem belongs to training or to testing by the hash of its prompt, so that a model trained
on the one half has never seen the other, whatever the seeds."""

#!/bin/sh
# One change from the default each, on validation parts, seeds 100 to 104; `one_change.py` makes the table and the plot.
set -eu
COMMON="--seeds 5 --set federation.seed=100 --set federation.cohort=5 --set federation.rounds=30 \
    --set federation.evaluate_every=0 --engine serial --quiet"
CHANGES="--vary federation.label_prior=0.0 --vary algorithm.calibration=0.0 --vary algorithm.model_steps=5,40 \
    --vary algorithm.model_lr=0.003,0.03 --vary algorithm.temperature=1.0 --vary algorithm.init_std=0.05 \
    --vary algorithm.noise=1.0 --vary algorithm.init_spread=0.01 --vary algorithm.ranks=fixed \
    --vary algorithm.predict_samples=4 --vary algorithm.class_rows=false --vary algorithm.samples=4"
DIGITS="--set data.dataset=digits --set data.clients=20 --set data.train_fraction=0.45"
lrbpfl tune $COMMON $CHANGES --out runs/one-change/speakers
lrbpfl tune $COMMON $CHANGES $DIGITS --set data.partition=labels --set data.labels_per_client=2 \
    --out runs/one-change/digits-labels
lrbpfl tune $COMMON $CHANGES $DIGITS --set data.partition=size --set data.skew=0.0 --set data.shift=concept \
    --set data.concept_groups=2 --out runs/one-change/digits-concept

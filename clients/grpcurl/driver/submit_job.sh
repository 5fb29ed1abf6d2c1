#!/bin/sh
# Submit a small job that trains on a tokenised corpus (`megascale data tokenize TEXT --output PREFIX`).
. "$(dirname "$0")/../common.sh"
usage 2 "$#" "NAME CORPUS_PREFIX [CHECKPOINT_FOLDER]"
checkpoint_spec=''
[ -z "${3:-}" ] || checkpoint_spec=', "checkpoint": {"uri": '$(quote "$3")', "interval_steps": '"${INTERVAL_STEPS:-20}"'}'
call "$(driver)" DriverService/SubmitJob '{
  "request_id": "'"$(request_id)"'",
  "spec": {
    "name": '"$(quote "$1")"',
    "trainer": {
      "model": {"layers": 1, "hidden_size": 32, "heads": 2, "vocab_size": 257, "sequence_length": 32},
      "training": {"steps": '"${STEPS:-100}"', "global_batch_size": 2, "precision": "PRECISION_FP32"},
      "optimizer": {"name": '"$(quote "${OPTIMIZER:-adamw}")"'},
      "data": {"sources": [{"prefix": '"$(quote "$2")"'}]}
    }'"$checkpoint_spec"'
  }
}'

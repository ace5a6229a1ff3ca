#!/usr/bin/env bash
# Starts a training command again and again until its run is complete.
#
#   scripts/run_until_complete.sh --workdir=DIR [options] -- COMMAND...
#   scripts/run_until_complete.sh --workdir=r/q -- python train.py --config=configs/quickstart.py --workdir=r/q
#
# With several processes start it once for each of them, on its host; one that ends takes the others along, and
# all come back together.
#
#   --workdir=DIR   the run folder, the same as in the command
#   --tries=N       give up after N failures without a new checkpoint in between (default 5)
#   --wait=SECONDS  between two starts, and at most for summary.json to show on a shared file system (default 5)
#   --keep-going    start again too when the command ends with 0 and an incomplete run
#
# How the command ends          what this script does
#   0 and DIR/summary.json      done: exit code 0
#   0 without it                a signal stopped the run and it is saved: the machine is being taken away. Exit
#                               code 0; with --keep-going another start, unless the signal came to this script
#   2                           wrong input, which another start would not heal: exit code 2
#   130                         two Ctrl-C: exit code 130
#   anything else               a failure: another start, or after --tries of them the command's exit code
#
# SIGTERM and Ctrl-C are passed on to the command, and no start follows. One line on stderr tells of every restart.
set -umo pipefail # m: the command gets a process group of its own, so that one Ctrl-C reaches it once

workdir="" tries=5 pause=5 keep_going=no
child="" stopping="" passed="" interrupted="" best=-1 failures=0 restarts=0

say() { echo "run_until_complete: $*" >&2; }

wrong() {
  say "error: $* (see --help)"
  exit 2
}

read_options() {
  while (($#)); do
    case $1 in
      --workdir=*) workdir=${1#*=} ;;
      --tries=*) tries=${1#*=} ;;
      --wait=*) pause=${1#*=} ;;
      --keep-going) keep_going=yes ;;
      --help | -h) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" && exit 0 ;;
      --) shift && break ;;
      *) wrong "unknown option $1: the command comes after --" ;;
    esac
    shift
  done
  command=("$@")
  [[ -n $workdir ]] || wrong "--workdir is missing"
  [[ $tries =~ ^[1-9][0-9]*$ ]] || wrong "--tries=$tries: use 1 or more"
  [[ $pause =~ ^[0-9]+$ ]] || wrong "--wait=$pause: use whole seconds"
  ((${#command[@]})) || wrong "there is no command after --"
}

pass_on() {
  stopping=$1 interrupted=yes
  [[ -n $child ]] || return 0
  kill "-$1" "$child" 2>/dev/null
  passed=yes
}

# One start of the command; its exit code in $code.
start() {
  passed=""
  "${command[@]}" &
  child=$!
  [[ -z $stopping || -n $passed ]] || pass_on "$stopping" # it came when there was no child yet
  while true; do
    interrupted=""
    wait "$child"
    code=$?
    [[ -n $interrupted ]] || break # a trap ends `wait` with a code of its own, the command may still be running
  done
  child=""
}

newest_checkpoint() {
  local path name found=-1
  for path in "$workdir"/checkpoints/*/; do
    name=$(basename "$path")
    [[ $name =~ ^[0-9]+$ ]] && ((10#$name > found)) && found=$((10#$name))
  done
  echo "$found"
}

is_complete() {
  local end=$((SECONDS + pause))
  while [[ ! -f $workdir/summary.json ]]; do
    ((SECONDS < end)) || return 1
    sleep 0.2
  done
}

# Counts the starts since the last new checkpoint; an older one taken up again is none.
count() {
  newest=$(newest_checkpoint)
  if ((newest > best)); then
    best=$newest failures=0
  fi
  ((++failures))
  shown="newest checkpoint $newest"
  ((newest >= 0)) || shown="no checkpoint yet"
}

main() {
  read_options "$@"
  trap 'pass_on TERM' TERM HUP
  trap 'pass_on INT' INT
  best=$(newest_checkpoint)
  while true; do
    start
    if ((code == 0)) && is_complete; then
      exit 0
    fi
    count
    if ((code == 2 || code == 130)); then
      say "exit code $code, $shown: no other start"
      exit "$code"
    fi
    if [[ -n $stopping ]] || { ((code == 0)) && [[ $keep_going == no ]]; }; then
      say "stopped by a signal: exit code $code, $shown; the same command goes on from there"
      exit "$code"
    fi
    if ((failures >= tries)); then
      say "gives up: exit code $code, $shown, failure $failures of $tries without a new one"
      exit $((code == 0 ? 1 : code))
    fi
    say "restart $((++restarts)): exit code $code, $shown, failure $failures of $tries without a new one"
    sleep "$pause"
    [[ -z $stopping ]] || exit 0
  done
}

main "$@"

# Run in the repository root on the GPU machine: bash .trial-fp4/profile.sh   (<= 60 s)
# ncu of today's 4-bit decode kernels (base, no dependent launch: nothing waits for anything), then
# times of other tiles. Each part is killed at its limit; no part needs another.
cd "$(dirname "$0")/.."
export PYTHONPATH=src:.trial-fp4 PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/triton-fp4}
OUT=${OUT:-/tmp/fp4}; mkdir -p $OUT
S=$(date +%s)
SEC=""; for s in SpeedOfLight ComputeWorkloadAnalysis WarpStateStats SchedulerStats Occupancy LaunchStats MemoryWorkloadAnalysis InstructionStats; do SEC="$SEC --section $s"; done
for v in today gu128 gu128w8 k256 s3 s5 s2 d64; do
  timeout -s KILL 24 python3 .trial-fp4/tiles.py nvfp4 q30 64 $v --warm > $OUT/warm-$v.log 2>&1 &
done
for f in "mxfp4 gpt_oss_20b" "nvfp4 q30"; do set -- $f
  timeout -s KILL 24 python3 .trial-fp4/prof.py $1 $2 64 > $OUT/pre-$1.log 2>&1 &
done
wait; tail -qn 1 $OUT/pre-*.log; echo "warm at $(($(date +%s)-S))"
for f in "nvfp4 q30" "mxfp4 gpt_oss_20b"; do set -- $f
  timeout -s KILL 20 ncu --clock-control none --target-processes all --kernel-name-base function \
    --kernel-name regex:'gate_up_activation|grouped_gemm' --launch-skip 2 --launch-count 2 $SEC --csv --page raw \
    python3 .trial-fp4/prof.py $1 $2 64 > $OUT/ncu-$1.csv 2> $OUT/ncu-$1.err
  python3 - $OUT/ncu-$1.csv <<'P'
import csv, re, sys
WANT = r"time_duration|throughput.avg.pct|bytes_read.sum$|warps_active.avg.pct|inst_executed.sum$|issue_active|inst_issued.avg|pipe_\w+.*(pct|sum$)|stalled.*ratio|registers_per|occupancy_limit|shared_mem_per_block|grid_size|wavefronts.*(pct|sum$)|conflict|hit_rate"
rows = [r for r in csv.reader(open(sys.argv[1], errors="replace")) if len(r) > 100]
if len(rows) < 3: print("no ncu rows:", open(sys.argv[1], errors="replace").read()[-1500:])
for i, name in enumerate(rows[0]) if rows else ():
    if name == "Kernel Name" or re.search(WANT, name): print(name[:75].ljust(76), *[r[i][:24].rjust(24) for r in rows[1:]])
P
  tail -c 400 $OUT/ncu-$1.err; echo "$1 at $(($(date +%s)-S))"
done
timeout -s KILL 20 python3 .trial-fp4/tiles.py nvfp4 q30 64 2>&1 | tail -12; echo "at $(($(date +%s)-S))"

python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl 2>&1 | tail -1
echo '' > /tmp/site/pycosat.py; export PYTHONPATH=/tmp/site:$PWD/src
mkdir -p $OUT; cd bench
timeout 80 python3 engine.py --shape 8b --record --commit fe8ad15ba37f954073bf6b195e95bcfe15125935 --runs 1 2>&1 | head -4
timeout 60 python3 engine.py --shape 0.6b --record --commit fe8ad15ba37f954073bf6b195e95bcfe15125935 --runs 2 --profile 2>&1 | head -4 
cp records/engine_8b.json records/engine_0_6b.json $OUT/
cd ..; timeout 80 python3 -m pytest -p no:cacheprovider -o addopts="" -o timeout=0 -q tests/gpu -k "(decode_attention and 64) or (fifty and 1.0) or fused_runner" 2>&1 | tail -5

"""SGLang: a bridge inside each scheduler process, and the control client that drives it over SGLang's own API.

rows.py        what each range of releases can do, and what of its internals the bridge touches
plugin.py      puts the bridge into a scheduler process (entry point `sglang.srt.plugins`)
models/        the same for releases without plugins: `SGLANG_EXTERNAL_MODEL_PACKAGE` points to it
bridge.py      inside the scheduler: pause, receive, fence, flush
runners.py     inside the scheduler: target and draft model runners as `weightsync` runners
acceptance.py  how well drafts are accepted: of requests inside the scheduler, of responses anywhere
control.py     in the trainer: `SglangControl`, over HTTP or an in-process `sglang.Engine`
stock.py       in the trainer: servers without a bridge, by their own sessions
launch.py      start a server with the seams set
"""

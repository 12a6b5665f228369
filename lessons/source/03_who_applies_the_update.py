# %% [markdown]
# # Who applies the update: the worker or the parameter server?
#
# You will find out from the trace of a real run, with four worker processes: who applies, and whether
# anything is broadcast. Then you will measure what two popular misreadings cost.
#
# *25 minutes. You need to know what a PyTorch training loop does.*

# %%
# %matplotlib inline
from IPython.display import Markdown

import distlab as dl
from distlab import plots
from distlab.exercises import pictures, who_applies

# %% tags=["parameters"] small="num_updates, worker_counts = 40, (1, 2)"
num_updates, worker_counts = 400, (1, 2, 4, 8)

# %% [markdown]
# ## Three workers, five events
#
# A *parameter server* holds the parameters. A worker ① pulls them, ② computes a gradient on its own batch, ③
# pushes it, and ⑤ goes on with newer parameters. In between, somebody ④ *applies* the gradient: runs the
# optimizer. Updates are counted; the count is the parameters' *version*.

# %%
pictures.space_time()

# %% [markdown]
# ## Predict
#
# Who applies: `"server"` or `"worker"`? And once worker 1's gradient is applied, what is sent to workers 0
# and 2?

# %%
my_guess = None

# %% [markdown] numbers="the padding is set in the next cell"
# ## Experiment
#
# Handwritten digits, a small network, four worker processes and one server process on this machine. Each
# gradient is padded to 5 ms, so that the workers are equally fast.

# %% tags=["real"]
task, cluster = dl.tasks.digits(), dl.LocalCluster(num_workers=4, compute_time_s=0.005)
run = dl.train(task, dl.AsyncPS(), cluster, num_updates=num_updates, progress=False)
run

# %% tags=["real"]
def some(run, span_s=0.03):
    start = run.seconds / 2
    return {"from_s": start, "to_s": start + span_s}

applied_by = run.summary()["who_applied"]
plots.plot_timeline(run, **some(run), title=f"you: {my_guess or 'no guess'}; the trace: {applied_by}")

# %% [markdown]
# A row per process, a thin line for each new version. Versions are born on the server's row (green), just
# after a push (orange) reached it. The workers' rows hold no green at all.

# %%
Markdown(f"**{applied_by} applied all {run.num_updates} updates**, one per gradient. Here is the life of one:")

# %% tags=["real"]
columns = ["who", "kind", "worker", "step", "read", "version", "start_s", "end_s"]
step = num_updates // 8
run.trace.table().query("worker == 1 and step == @step")[columns].round(4)

# %% tags=["real"]
print(run.trace.where("apply", worker=1)[step])

# %% [markdown]
# So a gradient read at version *v* is applied as version *u*, and *u* − 1 − *v* others came in between. That
# number is its *staleness*. Nobody checks it and nobody waits until it is zero.

# %% tags=["real"]
wait = run.trace.select("wait")
wait_ms = 1000 * sorted(wait["end_s"] - wait["start_s"])[len(wait) // 2]
Markdown(
    f"Mean staleness **{run.mean_staleness:.2f}**; closed form for {cluster.num_workers} equal workers, N − 1: "
    f"**{cluster.num_workers - 1}** (the very first gradients are fresher). After a push, a worker had its "
    f"answer in {wait_ms:.1f} ms (median): it waits for its own gradient to be applied, never for another worker."
)

# %% [markdown]
# Four processes on a busy machine are never quite equal, and real workers less so. **Predict.** Their compute
# times now vary at random. Does the mean staleness grow, or shrink, or stay? And is there still a gradient
# that is not stale at all?
#
# A virtual clock answers at once: the same strategy, but nobody computes anything. Move the slider, then
# choose other times.

# %%
def ages(workers=4, times="exponential"):
    laws = {"equal": 1.0, "exponential": dl.laws.Exponential(mean_s=1.0)}
    virtual = dl.SimulatedCluster(workers, compute=laws[times], gradients="none")
    return plots.plot_staleness(dl.train(task, dl.AsyncPS(), virtual, num_updates=1000, progress=False))

dl.Explorer(ages, workers=(1, 16), times=["equal", "exponential"])

# %% [markdown]
# The mean stays at N − 1, whatever the times: until a worker is done, the others hand in one gradient each, *on
# average*. Chance moves only the spread. With exponential times (orange) fresh is even the most frequent
# age, for a lucky worker is done before anybody else; an unlucky one pays for it.

# %% [markdown]
# Is anything broadcast? Count every message. (`unused` gradients arrived after the last update.)

# %% tags=["real"]
run.trace.table().groupby(["who", "kind"]).size().unstack(fill_value=0)

# %% tags=["real"]
pushes, pulls = len(run.trace.select("push")), len(run.trace.select("pull"))
seen = {int(v) for v in run.trace.select("pull", who="worker 1")["version"]}
Markdown(
    f"{pulls} pulls for {pushes} pushes: one answer per push, and one first pull per worker. That leaves "
    f"**{pulls - pushes - cluster.num_workers} messages that nobody asked for: nothing is broadcast.** Worker 1 "
    f"saw {len(seen)} of {run.version + 1} versions; the others came and went without it."
)

# %% [markdown]
# ## The same in ten lines
#
# One parameter x, loss x²/2 (so the gradient *is* the x that was read), learning rate ¼, and no processes.
# Both workers pull 64. By pencil: 64 − 16 = 48, then 48 − 16 = 32. With a fresh pull the second step would
# give 36.

# %%
x, version, read = 64.0, 0, {}
for worker, does in [(0, "pull"), (1, "pull"), (0, "push"), (1, "push"), (0, "pull"), (0, "push")]:
    if does == "pull":
        read[worker] = x, version
    else:
        gradient, at = read[worker]
        x, version = x - gradient / 4, version + 1
        print(f"worker {worker} read version {at}, applied as version {version}: x = {x:g}")

# %%
import inspect

print(inspect.getsource(dl.AsyncPS.serve))
print(inspect.getsource(dl.AsyncPS.work))

# %% [markdown]
# The package's version differs by two things. `serve` runs once per worker, in a thread of the server, so two
# updates may overlap (`locking="none"`, the default) or not (`"server"`). And `worker.reply()` makes the
# answer to a push the next pull.

# %% [markdown]
# ## First misreading: the worker applies, and writes the parameters back
#
# It sounds equivalent, and is easily read into a diagram. Look for `updater.step`, on the worker's own copy,
# and for what it then sends: parameters.

# %%
print(inspect.getsource(dl.WorkerApplies.work))

# %% [markdown]
# **Predict.** Four equal workers write back in turn. Of all their updates, which share is in the parameters
# at the end? A number from 0 to 1.

# %%
my_share = None

# %%
def sweep(strategy):
    runs = {}
    for p in worker_counts:
        with dl.LocalCluster(num_workers=p, compute_time_s=0.005) as workers:
            runs[p] = dl.train(task, strategy, workers, num_updates=num_updates, progress=False)
    return runs

writing = sweep(dl.WorkerApplies())

# %% [markdown]
# How can one count updates in a vector of numbers? By descent: each write in the trace says which version it
# was made from. Start at the last one and follow its ancestors to version 0; what is not among them was
# overwritten.

# %% tags=["real"]
from distlab.reports import survivors

found = {p: survivors(r.trace) for p, r in writing.items()}
found

# %% tags=["real"]
shares = {"WorkerApplies": {p: s.share for p, s in found.items()}}
closed = {"1/P": lambda p: 1 / p}
pictures.against(shares, closed, ylabel="share of updates that survive", guess=my_share)

# %% [markdown]
# Between a worker's read and its write, each of the others writes once, and all of that is overwritten. One
# in P survives. Worse, the answer to a write is the writer's own parameters: the P workers train P separate
# models, and that of the last writer is kept.
#
# Is the descent to be believed? Ask a model that counts: each of its updates adds exactly 1.

# %% tags=["real"]
counter = who_applies.counting_task()
back = dl.train(counter, dl.WorkerApplies(), cluster, num_updates=num_updates, progress=False)
push = dl.train(counter, dl.AsyncPS(locking="server"), cluster, num_updates=num_updates, progress=False)
Markdown(
    f"{num_updates} updates by {cluster.num_workers} workers. Written back, the counter ends at "
    f"**{back.model.count.item():g}** (by descent: {survivors(back.trace).surviving}); applied by the server, "
    f"at **{push.model.count.item():g}**."
)

# %% [markdown]
# What does it cost? Compare with one worker that makes only as many updates as survived.

# %% tags=["real"]
most = max(worker_counts)
pushing, left = sweep(dl.AsyncPS()), found[most].surviving
alone = dl.train(task, dl.SingleWorker(), cluster, num_updates=left, progress=False)
compared = {f"AsyncPS, {most} workers": pushing[most], f"WorkerApplies, {most} workers": writing[most]}
plots.plot_loss({**compared, f"one worker, {left} updates": alone})

# %% tags=["real"]
accuracy = [r.evaluate()["accuracy"] for r in (pushing[most], writing[most], alone)]
Markdown(
    f"Accuracy after {num_updates} updates: **{accuracy[0]:.1%}** applied by the server, **{accuracy[1]:.1%}** "
    f"written back. One worker alone reached {accuracy[2]:.1%} with {left} updates: {most} computers did the work "
    "of one."
)

# %% [markdown]
# ## Second misreading: the server sends everybody the gradients
#
# Then the server is a post office, and every worker applies everything (`dl.BroadcastGradients`). This loses
# no update. First what `AsyncPS` sends:

# %%
n_kB = run.params.nbytes / 1000
Markdown(f"Gradient and parameters are {n_kB:.1f} kB each; per update, AsyncPS moves one up and one down.")

# %% [markdown]
# **Predict.** How many kB per update with four workers, if each gradient goes to all of them?

# %%
my_kB = None

# %% tags=["real"]
posting = sweep(dl.BroadcastGradients())
kB = {
    name: {p: run.bytes_sent / run.num_updates / 1000 for p, run in runs.items()}
    for name, runs in {"BroadcastGradients": posting, "AsyncPS": pushing}.items()
}
closed = {"(P + 1) n": lambda p: (p + 1) * n_kB, "2 n": lambda p: 2 * n_kB}
pictures.against(kB, closed, ylabel="kB sent per update", guess=my_kB)

# %% tags=["real"]
Markdown(
    f"With {most} workers: **{kB['BroadcastGradients'][most]:.0f} kB** per update, against "
    f"{kB['AsyncPS'][most]:.0f} kB; and **{len(posting[most].who_applied)} optimizers**, against "
    f"{len(pushing[most].who_applied)}. Accuracy: {posting[most].evaluate()['accuracy']:.1%}, against "
    f"{pushing[most].evaluate()['accuracy']:.1%}. "
    "(The lines leave out headers, first pulls and what was not yet delivered at the end.)"
)

# %% [markdown]
# ## Break it
#
# Let a worker of `AsyncPS` try to apply its gradient itself:

# %% tags=["real", "raises-exception"]
# %xmode Minimal
class Impatient(dl.AsyncPS):
    def work(self, worker, server):
        for batch in worker.batches():
            server.apply(worker.gradient(server.pull(), batch))

dl.train(task, Impatient(), cluster, num_updates=num_updates, progress=False)

# %% [markdown]
# What a worker holds is not the server but its port: a link with `pull` and `push`. The parameters are in
# another process, and so is whoever may change them.

# %% [markdown]
# ## Try it
#
# A strategy is a class, and yours may be one of four lines. Here worker 0 oversleeps. Before you move a
# slider:
#
# 1. Worker 0 takes five times as long. How much longer do the *others* wait?
# 2. Whose gradients become staler, worker 0's or the others'?

# %%
# %xmode Context
import time
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, repr=False)
class OneIsSlow(dl.AsyncPS):
    delay_ms: int = 20

    def work(self, worker, server):
        params = server.pull()
        for batch in worker.batches():
            time.sleep(self.delay_ms / 1000 if worker.index == 0 else 0)
            params = server.push(worker.gradient(params, batch))

# %% tags=["real"]
def trial(delay_ms=20, num_workers=4):
    some_workers = dl.LocalCluster(num_workers=num_workers, compute_time_s=0.005)
    slow = OneIsSlow(delay_ms=delay_ms)
    run = dl.train(task, slow, some_workers, num_updates=num_updates, progress=False)
    staleness = run.history.groupby("worker")["staleness"].mean()
    said = ", ".join(f"{worker}: {mean:.1f}" for worker, mean in staleness.items())
    return plots.plot_timeline(run, **some(run, 0.06), title=f"mean staleness by worker: {said}")

trial()

# %% tags=["real"]
from ipywidgets import IntSlider, interact

delay = IntSlider(20, min=0, max=50, step=10, continuous_update=False)
workers = IntSlider(4, min=1, max=8, continuous_update=False)
sliders = interact(trial, delay_ms=delay, num_workers=workers)

# %% [markdown]
# ## Exercise: lose nothing
#
# Let the workers run the optimizer after all, and still lose no update. What does a worker send, and what
# does the server make of it? Two lines, five minutes.

# %%
def to_send(read, new):
    """On the worker: `read` is what it pulled, `new` what its optimizer made of it."""
    ...

def at_server(held, message):
    """On the server: `held` are its parameters now. Returns what they shall be."""
    ...

# %%
who_applies.check(to_send, at_server)

# %% [markdown]
# <details><summary>Hint</summary>
#
# A worker's `new` contains two things: what it pulled, which the server knows better by now, and what it did
# itself. Only one of them is news.
#
# </details>
#
# [Solution](solutions/03_who_applies_the_update.py)

# %% [markdown]
# ## What real systems do
#
# - **TensorFlow 1**, between-graph: `replica_device_setter` puts each variable on a parameter server, and the
#   apply operation sits beside its variable. A worker's session *issues* it; the server *executes* it.
#   `use_locking=False`, the default, lets updates of a variable overlap: our `locking="none"`. `global_step`
#   is one more variable there, our version.
# - **DistBelief**, its forerunner: workers push gradients, servers apply them, with Adagrad's state on the
#   server.
# - **All-reduce** (PyTorch's DDP): there every worker does apply, the same mean of all gradients, after
#   waiting for all of them. Nothing is lost because nobody is alone.
#
# Left out here: parameters split over several servers (pushes then arrive in a different order on each),
# updates that overlap and lose single elements, momentum, and workers that die.

# %% [markdown]
# ## Recap
#
# - The **server** applies, one update per gradient, on arrival; the worker only computes.
# - **Nothing is broadcast**: a worker gets newer parameters as the answer to its own push, N − 1 versions
#   later.
# - If workers wrote parameters back, 1/P of the updates would survive; if gradients were broadcast, P + 1
#   messages would carry what 2 can.
#
# **Where next.** Put `dl.SyncPS()` or `dl.AllReduce()` in place of `dl.AsyncPS()` in the experiment, and look
# at the first timeline again: who applies, and who waits for whom?
#
# **Papers.** Dean et al. 2012, *Large scale distributed deep networks*, section 4.1 (Downpour SGD). Li et al.
# 2014, *Scaling distributed machine learning with the parameter server*, section 3.3 (functions that run on
# the server). Abadi et al. 2016, *TensorFlow*, OSDI, section 4.4 and figure 4. Niu et al. 2011, *Hogwild!*,
# section 3.

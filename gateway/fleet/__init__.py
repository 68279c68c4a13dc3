"""Many Tritons as one: which replica gets a request, and what happens if that fails.

**States.** A probe requests each replica's repository index twice a second, on a fresh connection, because a
Triton that shuts down still answers on existing ones. A replica is `DOWN` until it answers, and at once when
it refuses a connection; it is `SLOW` after two probes without an answer in time, and `UP` with the next one.
Only the probe (`HealthMonitor`) writes the state of a `Replica`: a request that found no connection, or a
model that is not there, is reported to it. Each change of a state or an index discards the `Candidates` of
all models, which are grouped again when they are needed.

**Ejection.** Probes do not see a replica that answers them and fails its requests: with a broken GPU it
fails each at once, looks less loaded than the others, and attracts their requests. So each replica has one
share of failures for each model, and one for its transport, in which recent requests weigh most. It is
ejected if at least half of the last requests failed, five or more, and the share of the others that serve
the model is at most half of its own: a model that fails everywhere, or a deadline that is too short
everywhere, is not the fault of a replica. Errors of Triton and deadlines count for the model; responses that
are not HTTP and lost connections count for the transport, of which at most half of the replicas are ejected.
An ejection lasts 5 s, and 5 s longer each time, up to 25 s. Then one request at a time is a trial: the third
success in a row, a second apart, ends the ejection, and a failure prolongs it. So a replica that goes on is
back within 30 s, and a broken one costs a request in 25 s. If all candidates are ejected, all are used, and a
process that ends takes its failures with it. A model that hangs on one replica is avoided for another reason
as well: the requests on which its Triton still works stay outstanding.

**Choice.** Of the candidates, two are picked at random, and the one with fewer outstanding requests is used
(`balancer.py`). A sequence goes where its first request went, which its id decides by rendezvous hashing.

**Retries.** A request is tried on a second replica only where it cannot run twice: it was not sent, or the
replica answered that it has not run it; or it reads metadata, which may run twice. Its body must be there
still, a running sequence has its state on one replica, and retries are at most a fifth of the requests, so
that they cannot double the load of a failing fleet. The rows of `failures.py` say this for each error, and
`dispatch.py` has one loop for each reason to send a request again: another version of a split, a model that
is loaded on demand, another replica.
"""

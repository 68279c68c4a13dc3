"""The Lua scripts of jobs in Redis. `KEYS[1]` is the prefix of their keys."""

from __future__ import annotations

from gateway.capabilities.jobs.job import MAX_COUNT, MAX_DOCUMENT_BYTES

# Documents may have been written by other programs. `JobReader` checks them; the scripts skip those whose
# fields they cannot use.
READ: str = f"""
local function key(name) return KEYS[1] .. name end
-- Return a document: false if it is missing, and '' if it is too large for a job.
local function find_document(id)
  local is_large = redis.call('HSTRLEN', key('documents'), id) > {MAX_DOCUMENT_BYTES}
  return is_large and '' or redis.call('HGET', key('documents'), id)
end
local function has_fields(job, kind, names)
  for _, name in ipairs(names) do
    local value = job[name]
    -- NaN is a number for cjson.
    if type(value) ~= kind or kind == 'number' and not (value >= 0 and value <= {MAX_COUNT}) then
      return false
    end
  end
  return true
end
local texts = {{'id', 'owner', 'model', 'state', 'idempotency_key', 'callback_host'}}
local numbers = {{'token', 'body_bytes', 'result_bytes', 'due_at', 'ended_at', 'callback_due_at'}}
-- Return a job, or nil.
local function read(id)
  local is_read, job = pcall(cjson.decode, find_document(id))
  local is_job = is_read and type(job) == 'table' and job.id == id
  return is_job and has_fields(job, 'string', texts) and has_fields(job, 'number', numbers) and job or nil
end
"""
# Arguments: the IDs. Returns each with its document.
FIND: str = (
    READ
    + """
local found = {}
for _, id in ipairs(ARGV) do
  table.insert(found, id)
  table.insert(found, find_document(id))
end
return found
"""
)
# Keeps a job and everything that finds it: sorted sets by number, turn or time.
PUT: str = (
    READ
    + r"""
-- The jobs in a state, of a model and of a caller, by their numbers; each may be '' for all.
local function list_key(state, model, owner)
  return key('list:' .. state .. '\n' .. model .. '\n' .. owner)
end
local function change_lists(job, command, ...)
  for _, state in ipairs({'', job.state}) do
    for _, model in ipairs({'', job.model}) do
      for _, owner in ipairs({'', job.owner}) do
        redis.call(command, list_key(state, model, owner), ...)
      end
    end
  end
end
local function count_unfinished(owner)
  local queued = redis.call('ZCARD', list_key('queued', '', owner))
  return queued + redis.call('ZCARD', list_key('running', '', owner))
end
local function idempotency_key(job) return job.owner .. '\n' .. job.idempotency_key end
local function is_unfinished(job) return job.state == 'queued' or job.state == 'running' end
local function add_bytes(job, sign)  -- as `Job.size_bytes`
  local size = job.result_bytes + (is_unfinished(job) and job.body_bytes or 0)
  redis.call('INCRBY', key('bytes'), string.format('%d', sign * size))  -- not -0
end
-- The queued jobs of an owner and a model, in their order, and of all.
local function line_of(job) return job.owner .. '\n' .. job.model end
local function update_line(line)
  local first = redis.call('ZRANGE', key('line:' .. line), 0, 0, 'WITHSCORES')
  if first[1] then
    redis.call('ZADD', key('lines'), first[2], line)
  else
    redis.call('ZREM', key('lines'), line)
  end
end
local function join_line(job)
  local turn = tonumber(redis.call('HGET', key('turn_of'), job.id) or '') or 0
  redis.call('ZADD', key('ready'), turn, job.id)
  redis.call('ZADD', key('line:' .. line_of(job)), turn, job.id)
  update_line(line_of(job))
end
local function leave_line(id, line)
  redis.call('ZREM', key('ready'), id)
  redis.call('ZREM', key('line:' .. line), id)
  update_line(line)
end
local function leave_queue(job)
  redis.call('ZREM', key('delayed'), job.id)
  leave_line(job.id, line_of(job))
  if count_unfinished(job.owner) == 0 then
    redis.call('HDEL', key('turns'), job.owner)
  end
end
local function put_time(name, id, time)
  if time > 0 then
    redis.call('ZADD', key(name), time, id)
  else
    redis.call('ZREM', key(name), id)
  end
end
-- `lease_ms` is that of the worker of a running job.
local function put(job, document, before, lease_ms)
  if before and not is_unfinished(job) then
    -- A Redis without memory refuses only what needs some before the first change: jobs can always end.
    redis.call('HDEL', key('turn_of'), job.id)
  end
  redis.call('HSET', key('documents'), job.id, document)
  add_bytes(job, 1)
  if before then
    add_bytes(before, -1)
  end
  if not before then
    change_lists(job, 'ZADD', redis.call('INCR', key('number')), job.id)
  elseif before.state ~= job.state then
    local number = redis.call('ZSCORE', list_key('', '', ''), job.id) or redis.call('INCR', key('number'))
    change_lists(before, 'ZREM', job.id)
    change_lists(job, 'ZADD', number, job.id)
  end
  put_time('ended', job.id, job.ended_at)
  put_time('callbacks:' .. job.callback_host, job.id, job.callback_due_at)
  if job.state == 'running' then
    redis.call('SET', key('lease:' .. job.id), '', 'PX', lease_ms)
  else
    redis.call('DEL', key('lease:' .. job.id))
  end
  if job.state ~= 'queued' then
    leave_queue(job)
  elseif before then
    redis.call('ZADD', key('delayed'), job.due_at, job.id)
  end
end
"""
)
# Arguments: the document, the most unfinished jobs of the owner, and the most bytes.
ADD: str = (
    PUT
    + r"""
local job = cjson.decode(ARGV[1])
local known = redis.call('HGET', key('documents'), job.id)
if known then  -- the command was sent a second time
  return job.id
end
if job.idempotency_key ~= '' then
  local id = redis.call('HGET', key('keys'), idempotency_key(job))
  if id and read(id) then
    return id
  end
end
if count_unfinished(job.owner) >= tonumber(ARGV[2]) then
  return 'TOO_MANY'
end
if tonumber(redis.call('GET', key('bytes')) or '0') + job.body_bytes > tonumber(ARGV[3]) then
  return 'FULL'
end
if job.idempotency_key ~= '' then
  redis.call('HSET', key('keys'), idempotency_key(job), job.id)
end
put(job, ARGV[1])
redis.call('PERSIST', key('file:' .. job.id .. '.body'))
-- Its turn: after the last job of the same caller, and not before the next one of others.
local last = tonumber(redis.call('HGET', key('turns'), job.owner) or '-1')
local turn = math.max(last + 1, tonumber(redis.call('GET', key('turn')) or '0'))
redis.call('HSET', key('turns'), job.owner, turn)
redis.call('HSET', key('turn_of'), job.id, turn)
join_line(job)
return job.id
"""
)
# Arguments: the document, the token that was seen, and the milliseconds of a lease.
REPLACE: str = (
    PUT
    + r"""
local job = cjson.decode(ARGV[1])
if redis.call('HGET', key('documents'), job.id) == ARGV[1] then  -- the command was sent a second time
  return 1
end
local before = read(job.id)
if not before or before.token ~= tonumber(ARGV[2]) then
  return 0
end
put(job, ARGV[1], before, ARGV[3])
return 1
"""
)
# Arguments: the ID.
DELETE: str = (
    PUT
    + r"""
local job = read(ARGV[1])
redis.call('HDEL', key('documents'), ARGV[1])  -- first, as in `put`
redis.call('ZREM', key('ended'), ARGV[1])
if not job then
  redis.call('ZREM', list_key('', '', ''), ARGV[1])
  return 0
end
add_bytes(job, -1)
change_lists(job, 'ZREM', job.id)
leave_queue(job)
redis.call('HDEL', key('turn_of'), job.id)
redis.call('DEL', key('lease:' .. job.id))
redis.call('ZREM', key('callbacks:' .. job.callback_host), job.id)
redis.call('HDEL', key('keys'), idempotency_key(job))
return 1
"""
)
# Arguments: the time, that after a lease, and as JSON objects the owners and the models that get no further
# place. Returns the ID and the document of the next job of the others. It is delayed by a lease: no other
# gateway finds it meanwhile, and if it is not started, it is found again. The jobs of each owner and model
# are a line of their own, so that those without a place are passed over at once.
FIND_NEXT: str = (
    PUT
    + r"""
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('delayed'), '-inf', ARGV[1], 'LIMIT', 0, 100)) do
  redis.call('ZREM', key('delayed'), id)
  local job = read(id)
  if job then
    join_line(job)
  end
end
local full_owners, full_models = cjson.decode(ARGV[3]), cjson.decode(ARGV[4])
for _, line in ipairs(redis.call('ZRANGE', key('lines'), 0, -1)) do
  local owner, model = line:match('^(.*)\n(.*)$')
  if not full_owners[owner] and not full_models[model] then
    repeat
      local id, turn = unpack(redis.call('ZRANGE', key('line:' .. line), 0, 0, 'WITHSCORES'))
      leave_line(id or '', line)
      if id and read(id) then
        redis.call('SET', key('turn'), turn)
        redis.call('ZADD', key('delayed'), ARGV[2], id)
        return {id, find_document(id)}
      end
    until not id
  end
end
return {}
"""
)
# Returns the running jobs without a worker, each with its document.
FIND_LAPSED: str = (
    READ
    + r"""
local found = {}
for _, id in ipairs(redis.call('ZRANGE', key('list:running\n\n'), 0, -1)) do
  if redis.call('EXISTS', key('lease:' .. id)) == 0 then
    table.insert(found, id)
    table.insert(found, find_document(id))
  end
end
return found
"""
)
# Arguments: the file, the position, the data, and the seconds after which it is deleted unless it has a job.
WRITE_BODY: str = """
redis.call('SETRANGE', KEYS[1] .. 'file:' .. ARGV[1], ARGV[2], ARGV[3])
return redis.call('EXPIRE', KEYS[1] .. 'file:' .. ARGV[1], ARGV[4])
"""
# Arguments: the time, the time after the lease, the most jobs, the host.
TAKE_DELIVERIES: str = (
    READ
    + """
local callbacks = key('callbacks:' .. ARGV[4])
local found = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', callbacks, 1, ARGV[1], 'LIMIT', 0, ARGV[3])) do
  if read(id) then
    redis.call('ZADD', callbacks, ARGV[2], id)
    table.insert(found, id)
    table.insert(found, find_document(id))
  else
    redis.call('ZREM', callbacks, id)
  end
end
return found
"""
)

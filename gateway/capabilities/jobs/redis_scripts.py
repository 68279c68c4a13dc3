"""The Lua scripts of jobs in Redis. `KEYS[1]` is the prefix of their keys."""

from __future__ import annotations

# Keeps a job and everything that finds it: the stream of the queue, and sorted sets by number or time.
PUT: str = """
local function key(name) return KEYS[1] .. name end
local function update_line(line)
  local first = redis.call('ZRANGE', key('line:' .. line), 0, 0, 'WITHSCORES')
  if first[1] then
    redis.call('ZADD', key('lines'), first[2], line)
  else
    redis.call('ZREM', key('lines'), line)
  end
end
local function join_line(id)
  local turn, line = redis.call('HGET', key('turn_of'), id), redis.call('HGET', key('line_of'), id)
  redis.call('ZADD', key('ready'), turn, id)
  redis.call('ZADD', key('line:' .. line), turn, id)
  update_line(line)
end
local function leave_line(id)
  if redis.call('ZREM', key('ready'), id) == 1 then
    local line = redis.call('HGET', key('line_of'), id)
    redis.call('ZREM', key('line:' .. line), id)
    update_line(line)
  end
end
local function drop_entry(id)
  local entry = redis.call('HGET', key('entries'), id)
  if entry then
    redis.call('XACK', key('queue'), 'gateways', entry)
    redis.call('XDEL', key('queue'), entry)
    redis.call('HDEL', key('entries'), id)
  end
  redis.call('ZREM', key('delayed'), id)
  leave_line(id)
end
local function is_limited(state)
  return state == 'queued' or state == 'running' or state == 'stored'
end
local function enqueue(id)
  redis.call('HSET', key('entries'), id, redis.call('XADD', key('queue'), '*', 'id', id))
end
local function count(id, owner, state, size, sign)
  redis.call('HINCRBY', key('states'), state, sign)
  redis.call('INCRBY', key('bytes'), string.format('%d', sign * size))  -- not -0
  if is_limited(state) and redis.call('HINCRBY', key('unfinished'), owner, sign) == 0 then
    redis.call('HDEL', key('unfinished'), owner)
    redis.call('HDEL', key('turns'), owner)
  end
end
local function put_time(name, id, time)
  if tonumber(time) > 0 then
    redis.call('ZADD', key(name), time, id)
  else
    redis.call('ZREM', key(name), id)
  end
end
-- The fields: id, owner, token, state, due_at, ended_at, callback_due_at, size, document, callback_host.
local function put(id, owner, token, state, due_at, ended_at, callback_due_at, size, document, host)
  local before = redis.call('HGET', key('state'), id)
  count(id, owner, state, size, 1)
  if before then
    count(id, owner, before, redis.call('HGET', key('size'), id), -1)
  end
  redis.call('HSET', key('state'), id, state)
  redis.call('HSET', key('size'), id, size)
  redis.call('HSET', key('token'), id, token)
  redis.call('HSET', key('documents'), id, document)
  put_time('ended', id, ended_at)
  put_time('callbacks:' .. host, id, callback_due_at)
  if state == 'queued' then
    redis.call('ZADD', key('queued'), redis.call('ZSCORE', key('all'), id), id)
    if before == 'running' then
      drop_entry(id)
      redis.call('ZADD', key('delayed'), due_at, id)
    end
  else
    redis.call('ZREM', key('queued'), id)
    if state ~= 'running' then
      drop_entry(id)
    end
  end
end
"""
# Further arguments: the most unfinished jobs of the owner, the most bytes, the idempotency key or "", and the
# model.
ADD: str = (
    PUT
    + """
local id, owner, name = ARGV[1], ARGV[2], ARGV[13]
if redis.call('HEXISTS', key('state'), id) == 1 then  -- the command was sent a second time
  return redis.call('HGET', key('documents'), id)
end
if name ~= '' then
  local known = redis.call('HGET', key('keys'), owner .. '\\n' .. name)
  if known then
    return redis.call('HGET', key('documents'), known)
  end
end
if tonumber(redis.call('HGET', key('unfinished'), owner) or '0') >= tonumber(ARGV[11]) then
  return 'TOO_MANY'
end
if tonumber(redis.call('GET', key('bytes')) or '0') + tonumber(ARGV[8]) > tonumber(ARGV[12]) then
  return 'FULL'
end
if name ~= '' then
  redis.call('HSET', key('keys'), owner .. '\\n' .. name, id)
end
local number = redis.call('INCR', key('number'))
redis.call('ZADD', key('all'), number, id)
redis.call('ZADD', key('of:' .. owner), number, id)
redis.call('PERSIST', key('file:' .. id .. '.body'))
put(unpack(ARGV, 1, 10))
-- Its turn: after the last job of the same caller, and not before the next one of others.
if ARGV[4] ~= 'queued' then
  return ARGV[9]
end
local last = tonumber(redis.call('HGET', key('turns'), owner) or '-1')
local turn = math.max(last + 1, tonumber(redis.call('GET', key('turn')) or '0'))
redis.call('HSET', key('turns'), owner, turn)
redis.call('HSET', key('turn_of'), id, turn)
redis.call('HSET', key('line_of'), id, owner .. '\\n' .. ARGV[14])
join_line(id)
return ARGV[9]
"""
)
# A further argument: the token that was seen.
REPLACE: str = (
    PUT
    + """
if redis.call('HGET', key('documents'), ARGV[1]) == ARGV[9] then  -- as above
  return 1
end
if redis.call('HGET', key('token'), ARGV[1]) ~= ARGV[11] then
  return 0
end
put(unpack(ARGV, 1, 10))
return 1
"""
)
# Arguments: id, owner, idempotency key, host of the callback, and the names of the files in Redis.
DELETE: str = (
    PUT
    + """
local id, owner = ARGV[1], ARGV[2]
local state = redis.call('HGET', key('state'), id)
if not state then
  return 0
end
count(id, owner, state, redis.call('HGET', key('size'), id), -1)
drop_entry(id)
for _, name in ipairs({'state', 'size', 'token', 'documents', 'turn_of', 'line_of'}) do
  redis.call('HDEL', key(name), id)
end
for _, name in ipairs({'all', 'of:' .. owner, 'queued', 'ended', 'callbacks:' .. ARGV[4]}) do
  redis.call('ZREM', key(name), id)
end
redis.call('HDEL', key('keys'), owner .. '\\n' .. ARGV[3])
for index = 5, #ARGV do
  redis.call('DEL', key('file:' .. ARGV[index]))
end
return 1
"""
)
# Arguments: the time, and as JSON objects the owners and the models that get no further place. Adds the next
# job of the others to the stream, which may have been lost, and returns it. The jobs of each owner and model
# are a line of their own, so that those without a place are passed over at once.
ENQUEUE_NEXT: str = (
    PUT
    + """
redis.pcall('XGROUP', 'CREATE', key('queue'), 'gateways', '0', 'MKSTREAM')
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('delayed'), '-inf', ARGV[1], 'LIMIT', 0, 100)) do
  redis.call('ZREM', key('delayed'), id)
  join_line(id)
end
local full_owners, full_models = cjson.decode(ARGV[2]), cjson.decode(ARGV[3])
for _, line in ipairs(redis.call('ZRANGE', key('lines'), 0, -1)) do
  local owner, model = line:match('^(.*)\\n(.*)$')
  if not full_owners[owner] and not full_models[model] then
    local first = redis.call('ZRANGE', key('line:' .. line), 0, 0, 'WITHSCORES')
    redis.call('SET', key('turn'), first[2])
    leave_line(first[1])
    enqueue(first[1])
    return {redis.call('HGET', key('documents'), first[1])}
  end
end
return {}
"""
)
# Arguments: the file, the position, the data, and the seconds after which it is deleted unless it has a job.
WRITE_BODY: str = """
redis.call('SETRANGE', KEYS[1] .. 'file:' .. ARGV[1], ARGV[2], ARGV[3])
return redis.call('EXPIRE', KEYS[1] .. 'file:' .. ARGV[1], ARGV[4])
"""
# Arguments: the consumer, and pairs of id and token. Returns the ids whose token is another one.
RENEW: str = """
local lost = {}
for index = 2, #ARGV - 1, 2 do
  local id = ARGV[index]
  local entry = redis.call('HGET', KEYS[1] .. 'entries', id)
  if entry and redis.call('HGET', KEYS[1] .. 'token', id) == ARGV[index + 1] then
    redis.call('XCLAIM', KEYS[1] .. 'queue', 'gateways', ARGV[1], 0, entry, 'JUSTID')
  else
    table.insert(lost, id)
  end
end
return lost
"""
# Arguments: the time, the time after the lease, the most jobs, the host.
TAKE_DELIVERIES: str = """
local callbacks = KEYS[1] .. 'callbacks:' .. ARGV[4]
local due = redis.call('ZRANGEBYSCORE', callbacks, 1, ARGV[1], 'LIMIT', 0, ARGV[3])
local documents = {}
for _, id in ipairs(due) do
  redis.call('ZADD', callbacks, ARGV[2], id)
  table.insert(documents, redis.call('HGET', KEYS[1] .. 'documents', id))
end
return documents
"""
# Arguments: the consumer. Deletes it, unless it has jobs, and those that ended a day ago.
DELETE_CONSUMERS: str = """
local queue = KEYS[1] .. 'queue'
for _, facts in ipairs(redis.call('XINFO', 'CONSUMERS', queue, 'gateways')) do
  local consumer = {}
  for index = 1, #facts, 2 do
    consumer[facts[index]] = facts[index + 1]
  end
  local is_old = consumer.name == ARGV[1] or consumer.idle > 86400000
  if is_old and consumer.pending == 0 then
    redis.call('XGROUP', 'DELCONSUMER', queue, 'gateways', consumer.name)
  end
end
return 1
"""

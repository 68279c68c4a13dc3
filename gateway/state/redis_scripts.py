"""The Lua scripts of the Redis store: changes of several keys, and read-modify-write changes, are atomic."""

from __future__ import annotations

SET_DESIRED_MODEL = """
if ARGV[3] ~= '' then
  local stored = redis.call('HGET', KEYS[1], ARGV[1])
  if (stored and string.match(stored, '^{"revision":(%d+),') or '0') ~= ARGV[3] then
    return 0
  end
end
local revision = redis.call('INCR', KEYS[2])
if ARGV[5] then
  revision = tonumber(ARGV[5])
end
redis.call('SET', KEYS[3], ARGV[2])
if ARGV[4] then
  redis.call('HSET', KEYS[1], ARGV[1], string.format('{"revision":%d,', revision) .. ARGV[4])
else
  redis.call('HDEL', KEYS[1], ARGV[1])
end
return revision
"""
SET_LABEL = """
if ARGV[3] then
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
else
  redis.call('HDEL', KEYS[1], ARGV[1])
end
redis.call('SET', KEYS[2], ARGV[2])
return 1
"""
# Return a hash only if it changed since the last read.
READ_IF_CHANGED = """
local change = redis.call('GET', KEYS[2])
if change and change == ARGV[1] then
  return {change}
end
return {change or '', redis.call('HGETALL', KEYS[1])}
"""
BEGIN_LOAD = """
local before = redis.call('HGET', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('SET', KEYS[2], ARGV[2])
redis.call('SET', KEYS[3], ARGV[4], 'PX', ARGV[3])
return before or ''
"""
END_LOAD = """
local load = redis.call('HGET', KEYS[1], ARGV[1])
if (load == ARGV[2] or load == ARGV[3]) and ARGV[3] ~= '' then
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
else
  redis.call('HDEL', KEYS[1], ARGV[1])
end
redis.call('SET', KEYS[2], ARGV[2] .. '.')
return 1
"""
FORGET_LOADS = """
local count = redis.call('HDEL', KEYS[1], unpack(ARGV, 2))
redis.call('SET', KEYS[2], ARGV[1])
return count
"""
ACQUIRE_LEASE = """
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then
  return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
RELEASE_LEASES = """
for _, key in ipairs(KEYS) do
  if redis.call('GET', key) == ARGV[1] then
    redis.call('DEL', key)
  end
end
return 1
"""
# Store a report with its time in milliseconds, and return those of others that are not too old. What is no
# report, or is from the future, is deleted.
EXCHANGE_REPORTS = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[1], ARGV[1], string.format('%d ', now) .. ARGV[2])
local reports = redis.call('HGETALL', KEYS[1])
local others = {}
for index = 1, #reports, 2 do
  local at, report = string.match(reports[index + 1], '^(%d+) ({.*})$')
  if not at or math.abs(now - tonumber(at)) > tonumber(ARGV[3]) then
    redis.call('HDEL', KEYS[1], reports[index])
  elseif reports[index] ~= ARGV[1] then
    others[#others + 1] = report
  end
end
return others
"""

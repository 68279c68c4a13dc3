"""The Lua scripts of the Redis store: changes of several keys, and read-modify-write changes, are atomic."""

from __future__ import annotations

SET_DESIRED_MODEL = """
local revision = redis.call('INCR', KEYS[2])
if ARGV[4] then
  revision = tonumber(ARGV[4])
end
redis.call('SET', KEYS[3], ARGV[2])
if ARGV[3] then
  redis.call('HSET', KEYS[1], ARGV[1], string.format('{"revision":%d,', revision) .. ARGV[3])
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
redis.call('SET', KEYS[3], '1', 'PX', ARGV[3])
return before or ''
"""
END_LOAD = """
if redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] and ARGV[3] ~= '' then
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
LEAD = """
redis.call('SET', KEYS[2], '1', 'PX', ARGV[2])
local leader = redis.call('GET', KEYS[1])
if leader and leader ~= ARGV[1] then
  return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
RESIGN = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
end
redis.call('DEL', KEYS[2])
"""

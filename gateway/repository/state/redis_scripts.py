"""The Lua scripts of the Redis store, each of which is one primitive, and atomic.

Any value can be one that no gateway has written. A key of another kind is an error of Redis.
"""

from __future__ import annotations

from typing import Final

# Prepended to each script that writes. Redis may execute it long after its caller gave up, if it was stopped
# meanwhile; a change that was answered with an error must not happen then. The deadline is the last argument.
CHECK_DEADLINE: Final = """
local time = redis.call('TIME')
if time[1] * 1000 + math.floor(time[2] / 1000) > tonumber(table.remove(ARGV)) then
  return redis.error_reply('EXPIRED')
end
"""
# The keys of these are the revision of the state, the last change of each table, and tables. An entry is its
# revision, a space and its value. Lua counts exactly to 15 digits.
TABLES: Final = """
local function parse_revision(stored)
  local digits = stored and string.match(stored, '^%d+') or '0'
  return #digits <= 15 and tonumber(digits) or 0
end
local revision = parse_revision(redis.call('GET', KEYS[1]))
"""
# The arguments are the largest entry of a reply, and the known change of each table. The result is the
# revision, and of each table its change, and unless that is known its entries, and the keys of those that are
# too large for a reply.
READ_TABLES: Final = f"""{TABLES}
local reply = {{revision}}
for index = 3, #KEYS do
  local change = redis.call('HGET', KEYS[2], KEYS[index]) or ''
  local table = {{change}}
  if change ~= ARGV[index - 1] then
    local entries, large = redis.call('HGETALL', KEYS[index]), {{}}
    for number = 1, #entries, 2 do
      if #entries[number + 1] > tonumber(ARGV[1]) then
        entries[number + 1] = ''
        large[#large + 1] = entries[number]
      end
    end
    table = {{change, entries, large}}
  end
  reply[index - 1] = table
end
return reply
"""
# The arguments are the known revision, the name of the change, the key of the entry, the expected and the
# kept revision, which can be empty, and the value, if there is one.
WRITE_ENTRY: Final = f"""{TABLES}
if revision < tonumber(ARGV[1]) then
  return -1
end
local stored = redis.call('HGET', KEYS[3], ARGV[3])
if ARGV[4] ~= '' and parse_revision(stored) ~= tonumber(ARGV[4]) then
  return 0
end
revision = string.format('%d', revision + 1)
redis.call('SET', KEYS[1], revision)
if ARGV[6] then
  redis.call('HSET', KEYS[3], ARGV[3], (ARGV[5] ~= '' and ARGV[5] or revision) .. ' ' .. ARGV[6])
else
  redis.call('HDEL', KEYS[3], ARGV[3])
end
redis.call('HSET', KEYS[2], KEYS[3], ARGV[2])
return revision
"""
# The arguments are the known revision, the name of the change, and of each entry the number of its table's
# key, its key and its value.
RESTORE_TABLES: Final = f"""{TABLES}
if revision >= tonumber(ARGV[1]) then
  return 0
end
redis.call('DEL', unpack(KEYS))
redis.call('SET', KEYS[1], ARGV[1])
for index = 3, #KEYS do
  redis.call('HSET', KEYS[2], KEYS[index], ARGV[2])
end
for index = 3, #ARGV, 3 do
  redis.call('HSET', KEYS[tonumber(ARGV[index])], ARGV[index + 1], ARGV[index + 2])
end
return 1
"""
# The arguments are the owner and the milliseconds of a claim. One that lasts longer is not of a gateway.
CLAIM: Final = """
local is_free
for _, key in ipairs(KEYS) do
  local owner, ttl = redis.call('GET', key), redis.call('PTTL', key)
  is_free = not owner or owner == ARGV[1] or ttl < 0 or ttl > tonumber(ARGV[2])
  if is_free then
    redis.call('SET', key, ARGV[1], 'PX', ARGV[2])
  end
end
return is_free and 1 or 0
"""
RELEASE: Final = """
for _, key in ipairs(KEYS) do
  if redis.call('GET', key) == ARGV[1] then
    redis.call('DEL', key)
  end
end
return 1
"""
# Store a report with its time in milliseconds, and return those of others that are not too old. What has no
# such time is deleted. The arguments are the owner, the report and the milliseconds for which it lasts.
EXCHANGE_REPORTS: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[1], ARGV[1], string.format('%d ', now) .. ARGV[2])
local reports = redis.call('HGETALL', KEYS[1])
local others = {}
for index = 1, #reports, 2 do
  local at, report = string.match(reports[index + 1], '^(%d+) (.*)$')
  if not at or math.abs(now - tonumber(at)) > tonumber(ARGV[3]) then
    redis.call('HDEL', KEYS[1], reports[index])
  elseif reports[index] ~= ARGV[1] then
    others[#others + 1] = report
  end
end
return others
"""
# Append an event, unless it is the last one: the response to a first attempt may have been lost. The
# arguments are the event and the number of events to keep.
APPEND_EVENT: Final = """
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if not last or last[2][2] ~= ARGV[1] then
  redis.call('XADD', KEYS[1], 'MAXLEN', ARGV[2], '*', 'event', ARGV[1])
end
return 1
"""
# Add to the counts of all keys, unless one would exceed its limit. The arguments are the milliseconds for
# which they are kept, the number to add, which may be negative, and the limits. The result is whether it was
# added, how many counts were no numbers, and the counts.
ADD_TO_COUNTERS: Final = """
local count = tonumber(ARGV[2])
local reply = {1, 0}
for index, key in ipairs(KEYS) do
  local stored = redis.call('GET', key)
  local used = stored and #stored <= 15 and string.match(stored, '^%d+$')
  reply[2] = reply[2] + (stored and not used and 1 or 0)
  used = tonumber(used or '0')
  if count > 0 and used + count > tonumber(ARGV[index + 2]) then
    reply[1] = 0
  end
  reply[index + 2] = used
end
if reply[1] == 1 and count ~= 0 then
  for index, key in ipairs(KEYS) do
    reply[index + 2] = math.max(reply[index + 2] + count, 0)
    redis.call('SET', key, string.format('%d', reply[index + 2]), 'PX', ARGV[1])
  end
end
return reply
"""
# Count a request in a sliding window. The key has the start of a window, what counts in it, and what counted
# in the previous one, of which a part still counts. The arguments are the amount and length of a window, the
# number of inferences (if it is more than one, one of them was counted before), and whether the request
# opened the window. The result is the time in milliseconds until there is room, and whether it was empty.
COUNT_INFERENCES: Final = """
local amount = tonumber(ARGV[1])
local length = tonumber(ARGV[2])
local inferences = tonumber(ARGV[3])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local stored = redis.call('HMGET', KEYS[1], 'start', 'current', 'previous')
local start = tonumber(stored[1]) or now
local current = tonumber(stored[2]) or 0
local previous = tonumber(stored[3]) or 0
-- What exceeds the amount counts in the next windows.
local function pass(windows)
  if windows > 0 then
    previous = math.max(math.min(current - amount * (windows - 1), amount), 0)
    current = math.max(current - amount * windows, 0)
    start = start + length * windows
  end
end
if not (start <= now) then -- the clock of Redis was set back
  current = 0
  previous = 0
end
pass(math.floor((now - start) / length))
if current + previous == 0 then
  start = now
end
local used = math.floor(previous * (1 - (now - start) / length)) + current
local added = inferences > 1 and inferences - 1 or 1
if used + added <= amount or used <= amount and (used == 0 or ARGV[4] == '1') then
  current = current + added
  redis.call('HSET', KEYS[1], 'start', start, 'current', current, 'previous', previous)
  redis.call('PEXPIRE', KEYS[1], start + length * (math.ceil(current / amount) + 1) - now)
  return {0, used == 0 and 1 or 0}
end
local needed = math.min(inferences, amount)
pass(math.ceil((current + needed) / amount) - 1)
local room = amount - needed - current
local free_at = start
if previous > room then
  free_at = start + length * (1 - (room + 1) / previous)
end
return {math.max(math.ceil(free_at - now), 0) + 1, 0}
"""

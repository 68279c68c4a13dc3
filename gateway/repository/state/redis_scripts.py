"""The Lua scripts of the Redis store, each of which is one primitive, and atomic.

Any key and value can be of a kind that no gateway has written.
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
IS_DAMAGED: Final = """
local function is_damaged(key, kind)
  local found = redis.call('TYPE', key).ok
  return found ~= kind and found ~= 'none'
end
"""
DELETE_DAMAGED: Final = f"""{IS_DAMAGED}
local function delete_damaged(kind)
  if is_damaged(KEYS[#KEYS], kind) then
    redis.call('DEL', KEYS[#KEYS])
  end
end
"""
# The keys of these are the revision of the state, the last change of each table, and tables. An entry is its
# revision, a space and its value. Lua counts exactly to 15 digits.
TABLES: Final = f"""{DELETE_DAMAGED}
local function parse_revision(stored)
  local digits = type(stored) == 'string' and string.match(stored, '^%d+') or '0'
  return #digits <= 15 and tonumber(digits) or 0
end
local function read_revision()
  for index = 2, #KEYS do
    if is_damaged(KEYS[index], 'hash') then
      return 0
    end
  end
  return parse_revision(redis.pcall('GET', KEYS[1]))
end
"""
# The arguments are the largest name, the largest entry of a reply, and of each table the known change and the
# largest entry. The result is the revision, and of each table whether it is damaged, its change, and unless
# that is known its entries, and the keys of those that are too large for a reply.
READ_TABLES: Final = f"""{TABLES}
local reply = {{read_revision()}}
for index = 3, #KEYS do
  local change = redis.pcall('HGET', KEYS[2], KEYS[index])
  change = type(change) == 'string' and change or ''
  local is_hash = not is_damaged(KEYS[index], 'hash')
  local entries
  local large = {{}}
  if change ~= ARGV[index * 2 - 3] then
    entries = is_hash and redis.call('HGETALL', KEYS[index]) or {{}}
    for number = 1, #entries, 2 do
      local size = #entries[number + 1]
      entries[number] = string.sub(entries[number], 1, ARGV[1])
      if size > tonumber(ARGV[2]) then
        entries[number + 1] = string.sub(entries[number + 1], 1, 15)
        if size <= tonumber(ARGV[index * 2 - 2]) then
          large[#large + 1] = entries[number]
        end
      end
    end
  end
  reply[index - 1] = {{is_hash and 0 or 1, change, entries, large}}
end
return reply
"""
# The arguments are the known revision, the name of the change, the key of the entry, the expected and the
# kept revision, which can be empty, and the value, if there is one.
WRITE_ENTRY: Final = f"""{TABLES}
if read_revision() < tonumber(ARGV[1]) then
  return -1
end
delete_damaged('hash')
local stored = redis.call('HGET', KEYS[3], ARGV[3])
if ARGV[4] ~= '' and parse_revision(stored) ~= tonumber(ARGV[4]) then
  return 0
end
local revision = read_revision() + 1
redis.call('SET', KEYS[1], string.format('%d', revision))
if ARGV[6] then
  local own = ARGV[5] ~= '' and ARGV[5] or string.format('%d', revision)
  redis.call('HSET', KEYS[3], ARGV[3], own .. ' ' .. ARGV[6])
else
  redis.call('HDEL', KEYS[3], ARGV[3])
end
if is_damaged(KEYS[2], 'hash') then
  redis.call('DEL', KEYS[2])
end
redis.call('HSET', KEYS[2], KEYS[3], ARGV[2])
return revision
"""
# The arguments are the known revision, the name of the change, and of each entry the number of its table's
# key, its key and its value.
RESTORE_TABLES: Final = f"""{TABLES}
if read_revision() >= tonumber(ARGV[1]) then
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
  local owner, ttl = redis.pcall('GET', key), redis.call('PTTL', key)
  is_free = type(owner) ~= 'string' or owner == ARGV[1] or ttl < 0 or ttl > tonumber(ARGV[2])
  if is_free then
    redis.call('SET', key, ARGV[1], 'PX', ARGV[2])
  end
end
return is_free and 1 or 0
"""
RELEASE: Final = """
for _, key in ipairs(KEYS) do
  if redis.pcall('GET', key) == ARGV[1] then
    redis.call('DEL', key)
  end
end
return 1
"""
# What is unreadable is an empty text.
GET_VALUES: Final = """
local reply = {}
for index, key in ipairs(KEYS) do
  local value = redis.pcall('GET', key)
  local is_unreadable = value and (type(value) ~= 'string' or #value > tonumber(ARGV[1]))
  reply[index] = is_unreadable and '' or value
end
return reply
"""
# Store a report with its time in milliseconds, and return those of others that are not too old. What has no
# such time is deleted.
EXCHANGE_REPORTS: Final = f"""{DELETE_DAMAGED}
delete_damaged('hash')
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[1], ARGV[1], string.format('%d ', now) .. ARGV[2])
local reports = redis.call('HGETALL', KEYS[1])
local others = {{}}
for index = 1, #reports, 2 do
  local stored = reports[index + 1]
  local at = string.match(string.sub(stored, 1, 20), '^(%d+) ')
  if not at or math.abs(now - tonumber(at)) > tonumber(ARGV[3]) then
    redis.call('HDEL', KEYS[1], reports[index])
  elseif reports[index] ~= ARGV[1] then
    others[#others + 1] = #stored <= tonumber(ARGV[4]) and string.sub(stored, #at + 2) or ''
  end
end
return others
"""
# Append an event, unless it is the last one: the response to a first attempt may have been lost. The
# arguments are the event and the number of events to keep. After the last possible id no other could follow.
APPEND_EVENT: Final = f"""{DELETE_DAMAGED}
delete_damaged('stream')
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if last and #string.match(last[1], '^%d+') > 15 then
  redis.call('DEL', KEYS[1])
  last = nil
end
if not last or last[2][2] ~= ARGV[1] then
  redis.call('XADD', KEYS[1], 'MAXLEN', ARGV[2], '*', 'event', ARGV[1])
end
return 1
"""
# The arguments are the first id, the number of events, and the largest one. The last event comes first.
READ_EVENTS: Final = f"""{IS_DAMAGED}
if is_damaged(KEYS[1], 'stream') then
  return {{}}
end
local found = redis.call('XREVRANGE', KEYS[1], '+', ARGV[1], 'COUNT', ARGV[2])
for _, event in ipairs(found) do
  local name, raw = event[2][1], event[2][2]
  event[2] = name == 'event' and #raw <= tonumber(ARGV[3]) and raw or ''
end
return found
"""
# Add to the counts of all keys, unless one would exceed its limit. The arguments are the milliseconds for
# which they are kept, the number to add, which may be negative, and the limits. The result is whether it was
# added, how many counts were no numbers, and the counts.
ADD_TO_COUNTERS: Final = """
local count = tonumber(ARGV[2])
local reply = {1, 0}
for index, key in ipairs(KEYS) do
  local stored = redis.pcall('GET', key)
  local used = type(stored) == 'string' and #stored <= 15 and string.match(stored, '^%d+$')
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

"""The Lua scripts of the Redis store: changes of several keys, and read-modify-write changes, are atomic."""

from __future__ import annotations

# Prepended to each script that writes. Redis may execute it long after its caller gave up, if it was stopped
# meanwhile; a change that was answered with an error must not happen then. The deadline is the last argument.
CHECK_DEADLINE = """
local time = redis.call('TIME')
if time[1] * 1000 + math.floor(time[2] / 1000) > tonumber(table.remove(ARGV)) then
  return redis.error_reply('EXPIRED')
end
"""
# Return a table, a hash or a set: the number of restorations, the revision of the state, the name
# of the last change of the table, and its entries only if that is not the known change. The keys are those of
# the table, of its last change, of the number of restorations, and of the revision.
READ_TABLE = """
local function read_table(command, known_change)
  local change = redis.call('GET', KEYS[2]) or ''
  local reply = {
    tonumber(redis.call('GET', KEYS[3]) or '0'), tonumber(redis.call('GET', KEYS[4]) or '0'), change
  }
  if change == '' or change ~= known_change then
    reply[4] = redis.call(command, KEYS[1])
  end
  return reply
end
"""
READ_IF_CHANGED = READ_TABLE + "return read_table(ARGV[1], ARGV[2])"
# A change of what the API set, in the place of %s, with the table as it is afterwards. The caller must have
# read what was restored after a loss, and must not know a later revision, which Redis has lost. The last
# arguments are the command that reads the table, the restorations and the revision that the caller knows, and
# the restorations that its copy of the table includes.
CHANGE_TABLE = (
    READ_TABLE
    + """
local read_restorations = tonumber(table.remove(ARGV))
local known_revision = tonumber(table.remove(ARGV))
local known_restorations = tonumber(table.remove(ARGV))
local command = table.remove(ARGV)
local restorations = tonumber(redis.call('GET', KEYS[3]) or '0')
if restorations ~= known_restorations or restorations ~= read_restorations
    or tonumber(redis.call('GET', KEYS[4]) or '0') < known_revision then
  return {-1}
end
local function change_table()
%s
end
return {change_table(), unpack(read_table(command, ''))}
"""
)
SET_DESIRED_MODEL = """
if ARGV[3] ~= '' then
  local stored = redis.call('HGET', KEYS[1], ARGV[1])
  if (stored and string.match(stored, '^{"revision":(%d+),') or '0') ~= ARGV[3] then
    return 0
  end
end
local revision = redis.call('INCR', KEYS[4])
if ARGV[5] then
  revision = tonumber(ARGV[5])
end
redis.call('SET', KEYS[2], ARGV[2])
if ARGV[4] then
  redis.call('HSET', KEYS[1], ARGV[1], string.format('{"revision":%d,', revision) .. ARGV[4])
else
  redis.call('HDEL', KEYS[1], ARGV[1])
end
return revision
"""
# Run a command on a table. The arguments are the name of the change, and the command without its key.
WRITE_ENTRY = """
redis.call(ARGV[2], KEYS[1], unpack(ARGV, 3))
redis.call('SET', KEYS[2], ARGV[1])
redis.call('INCR', KEYS[4])
return 1
"""
# Write the last known state again after a loss. Each table says with which revision its writer had read it,
# so that a gateway that had read a later one replaces it, unless it was changed since. The first arguments
# are the restorations and the revision that the caller knows. For each table follow the restorations that it
# includes, the revision with which it was read (0: never), the command that writes it, and the number of its
# values, followed by these. The result is whether the state was lost, and the number of tables written.
RESTORE = """
local restorations = tonumber(redis.call('GET', KEYS[#KEYS - 1]) or '0')
local revision = tonumber(redis.call('GET', KEYS[#KEYS]) or '0')
local known_restorations = tonumber(ARGV[1])
local known_revision = tonumber(ARGV[2])
local is_lost = restorations < known_restorations
  or restorations == known_restorations and revision < known_revision
if is_lost then
  restorations = known_restorations + 1
end
local written = 0
local position = 3
for number = 1, #KEYS - 2, 2 do
  local table_restorations = tonumber(ARGV[position])
  local source = tonumber(ARGV[position + 1])
  local command = ARGV[position + 2]
  local last = position + 3 + tonumber(ARGV[position + 3])
  local change = redis.call('GET', KEYS[number + 1]) or ''
  local restored = tonumber(string.match(change, '^restored:' .. restorations .. ':(%d+)$'))
  local is_later = table_restorations < restorations and restored and restored < source
  if is_lost and source > 0 or is_later then
    redis.call('DEL', KEYS[number])
    for first = position + 4, last, 1000 do -- a limit of unpack()
      redis.call(command, KEYS[number], unpack(ARGV, first, math.min(first + 999, last)))
    end
    written = written + 1
  end
  if is_lost or is_later then
    redis.call('SET', KEYS[number + 1], 'restored:' .. restorations .. ':' .. source)
  end
  position = last + 1
end
if is_lost or written > 0 then
  redis.call('SET', KEYS[#KEYS - 1], restorations)
  redis.call('SET', KEYS[#KEYS], math.max(revision, known_revision) + 1)
end
return {is_lost and 1 or 0, written}
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
for index = 2, #ARGV do
  redis.call('HDEL', KEYS[1], ARGV[index])
end
redis.call('SET', KEYS[2], ARGV[1])
return 1
"""
# Append an event, unless it is the last one: the response to a first attempt may have been lost. The
# arguments are the event and the number of events to keep.
APPEND_EVENT = """
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if not last or last[2][2] ~= ARGV[1] then
  redis.call('XADD', KEYS[1], 'MAXLEN', ARGV[2], '*', 'event', ARGV[1])
end
return 1
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
# Count a request in a sliding window. The key has the start of a window, what counts in it, and what counted
# in the previous one, of which a part still counts. The arguments are the amount and length of a window, the
# number of inferences (if it is more than one, one of them was counted before), and whether the request
# opened the window. The result is the time in milliseconds until there is room, and whether it was empty.
COUNT_INFERENCES = """
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
# Add to the counts of all keys, unless one would exceed its limit. The arguments are the seconds for which
# they are kept, the number to add, which may be negative, and the limits. The result is whether it was added,
# and the counts.
ADD_TO_QUOTA = """
local count = tonumber(ARGV[2])
local reply = {1}
for index, key in ipairs(KEYS) do
  local used = tonumber(redis.call('GET', key) or '0')
  if count > 0 and used + count > tonumber(ARGV[index + 2]) then
    reply[1] = 0
  end
  reply[index + 1] = used
end
if reply[1] == 1 and count ~= 0 then
  for index, key in ipairs(KEYS) do
    reply[index + 1] = math.max(reply[index + 1] + count, 0)
    redis.call('SET', key, string.format('%d', reply[index + 1]), 'EX', ARGV[1])
  end
end
return reply
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

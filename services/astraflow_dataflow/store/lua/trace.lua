-- Traces: what happened to a task, for people. One bounded list per leased task; it ends with the answers to repeated pushes, and earlier
-- when many tasks have finished since. Entries are tab separated: kind, ms, then what the kind says (tracing.py reads them).

local MAX_TRACE = 4000
local MAX_TRACED = 10000

local function trace_entry(kind, ...)
  return table.concat({ kind, now_text(), ... }, '\t')
end

-- Adds to an existing list only: what comes after a trace was forgotten must not begin another. Returns its length.
local function note_all(P, task, entries)
  local length = call('RPUSHX', K.trace(P, task), unpack(entries))
  if length > MAX_TRACE then call('RPOP', K.trace(P, task), length - MAX_TRACE) end
  return length
end

local function note(P, task, kind, ...)
  return note_all(P, task, { trace_entry(kind, ...) })
end

-- Begins the trace of a task that has none, with when it was queued, by its lane and its entry there; that of a task which is done stays away.
local function begin_trace(P, task, lane, entry, ...)
  if entry then call('RPUSH', K.trace(P, task), 'Q\t' .. string.match(entry, '^%d+') .. '\t' .. lane, ...) end
end

-- Lets a finished task's trace end some day; of very many finished ones only the newest are kept.
local function close_trace(P, task, ttl_ms)
  if call('PEXPIRE', K.trace(P, task), ttl_ms) == 0 then return end
  gather('RPUSH', K.traced(P), task)
  CALL.traced = (CALL.traced or call('LLEN', K.traced(P))) + 1
  if CALL.traced > MAX_TRACED then
    CALL.traced = CALL.traced - 1
    local oldest = call('LPOP', K.traced(P))
    if call('HGET', K.task(P, oldest), 'state') == 'done' then call('UNLINK', K.trace(P, oldest)) end
  end
end

-- Of episodes that a node pushed together: a line of each, member and id, and after an empty one a line of each of their trajectories, as many of the
-- one as of the other.
local function push_entry(p, outcome, reason, who, traces)
  return 'E\t' .. now_text() .. '\t' .. p.attempt .. '\t' .. p.node .. '\t' .. outcome .. '\t' .. (p.failed or '0') .. '\t' .. reason
    .. '\n' .. who .. '\n\n' .. traces
end

-- A group's id begins with its task's, and task ids hold no slash.
local function note_group(P, gid, kind, ...)
  note(P, string.match(gid, '^[^/]+'), kind, gid, ...)
end

-- trace: task. Returns { '1' when ever submitted, { state, attempt, size, left, lane, why, avoid, entry }, deadline or '', entries }.
SIGNATURE.trace = { 'task' }
function F.trace(keys, a)
  local P, task = keys[1], a.task
  local f = call('HMGET', K.task(P, task), 'state', 'attempt', 'size', 'left', 'lane', 'why', 'avoid', 'entry')
  for i = 1, 8 do f[i] = f[i] or '' end
  return { tostring(call('SISMEMBER', K.known(P), task)), f, call('ZSCORE', K.leases(P), task) or '', call('LRANGE', K.trace(P, task), 0, -1) }
end

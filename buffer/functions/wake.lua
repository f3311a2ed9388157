-- Limits, and who waits for them. A waiter registers what it waits for, in the same step that finds it missing; the
-- transition that fulfils it takes the registration away and pushes one token, on which the waiter's connection sleeps.

local WAKE_TTL_MS = 600000  -- tokens of a waiter that died
local MOST_LOOKS = 64       -- waiters looked at by one change

-- The limit that stops a put of so many rows and bytes, as {name, value, limit}; nil when there is room.
local function put_limit(t, rows, bytes)
  local config, state = t.config, t.state
  local live = live_rows(t)
  if live + rows > config.capacity_rows then return {'rows', live, config.capacity_rows} end
  if config.capacity_bytes and state[BYTES] + bytes > config.capacity_bytes and state[BYTES] > 0 then
    return {'bytes', state[BYTES], config.capacity_bytes}
  end
  if config.window then
    local admitted = state[ADMITTED] - state[DROPPED]
    local most = config.window.rows_per_version * (state[TRAINER] + 1 + config.window.versions)
    if admitted + rows > most then return {'versions', admitted, most} end
  end
  for i, stage in ipairs(t.stages) do
    local ratio = stage.samples_per_insert
    if ratio then
      local surplus = (state[ADMITTED] + rows) * ratio - stage_state(t, i, TAKEN)
      local most = stage.min_size * ratio + stage.error_buffer
      if surplus > most then return {'samples_per_insert', surplus, most} end
    end
  end
  return nil
end

-- Rows that a claim of stage i may take now, by its rate limiter.
local function allowed_rows(t, i)
  local stage = t.stages[i]
  local ratio = stage.samples_per_insert
  if not ratio then return math.huge end
  local least = stage.min_size * ratio - stage.error_buffer
  return math.floor(t.state[ADMITTED] * ratio - stage_state(t, i, TAKEN) - least)
end

-- Has stage i ready rows of chunks up to this ordinal?
local function ready_up_to(t, i, ordinal)
  local stage, key = t.stages[i], t.prefix .. KEY.ready .. i
  if not stage.by_unit then
    local head = stage.selector == 'fresh_first' and redis.call('ZREVRANGE', key, 0, 0, 'WITHSCORES')
      or redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')
    local oldest = head[2]
    return oldest and math.abs(tonumber(oldest)) <= ordinal
  end
  for _, id in ipairs(redis.call('ZRANGE', t.prefix .. KEY.since .. i, 0, -1)) do
    if chunk_of(t, id).ordinal <= ordinal then return true end
  end
  return false
end

-- May stage i take less than its min_batch: the upstream has closed, or the oldest row has waited long enough?
local function flushed(t, i)
  local stage, closed = t.stages[i], t.state[CLOSED]
  if closed > 0 then
    local waiting = redis.call('ZRANGE', t.prefix .. KEY.open .. i, 0, 0, 'WITHSCORES')
    if (not waiting[2] or tonumber(waiting[2]) > closed) and ready_up_to(t, i, closed) then return true end
  end
  if stage.max_wait_ms then
    local oldest = redis.call('ZRANGE', t.prefix .. KEY.since .. i, 0, 0, 'WITHSCORES')
    if oldest[2] and tonumber(oldest[2]) + stage.max_wait_ms <= t.now then return true end
  end
  return false
end

-- Can a claim of at least so many rows succeed now?
local function claimable(t, i, rows)
  local stage, ready = t.stages[i], stage_state(t, i, READY)
  if ready == 0 or ready < rows or ready < stage.min_size then return false end
  if allowed_rows(t, i) < rows then return false end
  return ready >= stage.min_batch or flushed(t, i)
end

-- Milliseconds until time alone may change something for a waiter of stage i (-1: never).
local function next_due(t, i)
  local due, stage = t.state[DUE], t.stages[i]
  if stage and stage.min_batch > 1 and stage.max_wait_ms then
    local oldest = redis.call('ZRANGE', t.prefix .. KEY.since .. i, 0, 0, 'WITHSCORES')
    if oldest[2] then due = math.min(due, tonumber(oldest[2]) + stage.max_wait_ms) end
  end
  if due == math.huge then return -1 end
  return math.max(0, due - t.now)
end

-- Is one of {stage, rows, settled or bytes}... fulfilled?
local function fulfilled(t, interests)
  for k = 1, #interests, 3 do
    local i, rows, third = interests[k], interests[k + 1], interests[k + 2]
    if i == 0 then
      if not put_limit(t, rows, third) then return true end
    elseif claimable(t, i, rows) or (third == 1 and waiting_rows(t, i) == 0) then
      return true
    end
  end
  return false
end

local function add_waiter(t, waiter, worker, left_ms, waited_ms, interests)
  local record = {t.now + left_ms, worker, t.now - waited_ms}
  for k = 1, #interests, 3 do
    local i, rows = interests[k], interests[k + 1]
    if i > 0 and interests[k + 2] == 1 then rows = 0 end
    local at = t.config.base[i]
    if redis.call('ZADD', t.prefix .. KEY.waiting .. i, t.now, waiter) == 1 then
      if t.state[at + WAITERS] == 0 then t.state[at + LEAST] = rows end
      t.state[at + WAITERS] = t.state[at + WAITERS] + 1
    end
    t.state[at + LEAST] = math.min(t.state[at + LEAST], rows)
    for f = k, k + 2 do record[#record + 1] = interests[f] end
  end
  redis.call('HSET', t.prefix .. KEY.waiters, waiter, cmsgpack.pack(record))
end

-- Take a registration away; returns 1 when it was there.
local function drop_waiter(t, waiter)
  local packed = redis.call('HGET', t.prefix .. KEY.waiters, waiter)
  if not packed then return 0 end
  redis.call('HDEL', t.prefix .. KEY.waiters, waiter)
  local record = cmsgpack.unpack(packed)
  for k = 4, #record, 3 do
    local i = record[k]
    if redis.call('ZREM', t.prefix .. KEY.waiting .. i, waiter) == 1 then add_to(t, i, WAITERS, -1) end
  end
  return 1
end

-- Has a first row begun to wait for stage i's `max_wait` just now? One waiter must know when that is over.
local function first_ages(t, i)
  if not t.ageing or not t.ageing[i] or not t.stages[i].max_wait_ms then return false end
  local oldest = redis.call('ZRANGE', t.prefix .. KEY.since .. i, 0, 0, 'WITHSCORES')
  return oldest[2] and tonumber(oldest[2]) == t.now
end

-- Wake those who wait for stage i (0: for room) and can have it, oldest first, as far as it goes; `one`: the oldest anyhow.
local function wake_stage(t, i, one)
  local at = t.config.base[i]
  local left = i == 0 and math.huge or t.state[at + READY]
  local least, seen = math.huge, 0
  for _, waiter in ipairs(redis.call('ZRANGE', t.prefix .. KEY.waiting .. i, 0, MOST_LOOKS - 1)) do
    seen = seen + 1
    local record = cmsgpack.unpack(redis.call('HGET', t.prefix .. KEY.waiters, waiter))
    local interests, own = {}, 0
    for k = 4, #record do interests[#interests + 1] = record[k] end
    for k = 1, #interests, 3 do
      if interests[k] == i then own = (i > 0 and interests[k + 2] == 1) and 0 or interests[k + 1] end
    end
    if record[1] < t.now then
      drop_waiter(t, waiter)
    elseif (own <= left and fulfilled(t, interests)) or one then
      one = false
      drop_waiter(t, waiter)
      redis.call('RPUSH', t.prefix .. KEY.wake .. waiter, '1')
      redis.call('PEXPIRE', t.prefix .. KEY.wake .. waiter, WAKE_TTL_MS)
      left = left - own
    else
      least = math.min(least, own)
    end
  end
  t.state[at + LEAST] = seen == MOST_LOOKS and math.min(least, t.state[at + LEAST]) or least
end

local function wake(t)
  local state, config = t.state, t.config
  if state[config.base[0] + WAITERS] > 0 and t.roomier then wake_stage(t, 0) end
  for i = 1, #t.stages do
    local at = config.base[i]
    if state[at + WAITERS] > 0 and i ~= t.quiet then
      local ages = first_ages(t, i)
      if ages or state[at + LEAST] == 0 or claimable(t, i, state[at + LEAST]) then wake_stage(t, i, ages) end
    end
  end
end

-- Where a unit rings next: an exponential clock of its rate, drawn from the table's seed, the unit, its uses and deliveries.
local function ring(t, chunk, i, u, sig)
  local member = chunk.id .. '#' .. u
  local stage, rate = t.stages[i], 1
  if stage.selector == 'prioritized' then
    rate = tonumber(redis.call('HGET', t.prefix .. KEY.priority .. i, member) or 1)
  end
  local at = t.config.pos[i]
  local text = table.concat({t.config.seed, stage.name, member, string.sub(sig, 2, 2), string.sub(sig, at + 1, at + 1)}, ':')
  local draw = (tonumber(string.sub(redis.sha1hex(text), 1, 13), 16) + 0.5) / 4503599627370496
  return string.format('%.17g', stage_state(t, i, CLOCK) - math.log(draw) / rate)
end

-- Units that stage i can claim: index -> a signature of one of their rows.
local function ready_units(t, chunk, runs, i)
  local units, at, row = {}, t.config.pos[i], 0
  local size = unit_rows(chunk, t.stages[i])
  for k = 1, #runs, 3 do
    if string.byte(runs[k + 2], at) == 114 then
      for u = math.floor(row / size), math.floor((row + runs[k] - 1) / size) do units[u] = units[u] or runs[k + 2] end
    end
    row = row + runs[k]
  end
  return units
end

-- Additions to and removals from sorted sets, gathered for one command each.
local function zadd(t, key, score, member)
  t.zadd = t.zadd or {}
  local list = t.zadd[key]
  if list then
    local n = #list
    list[n + 1], list[n + 2] = score, member
  else
    t.zadd[key] = {score, member}
  end
end

local function zrem(t, key, member)
  t.zrem = t.zrem or {}
  local list = t.zrem[key]
  if list then list[#list + 1] = member else t.zrem[key] = {member} end
end

local function in_parts(command, key, list)
  if #list <= SOME then
    redis.call(command, key, unpack(list))
    return
  end
  for from = 1, #list, SOME do redis.call(command, key, unpack(list, from, math.min(from + SOME - 1, #list))) end
end

-- Where the chunk stands among those that are ready for the stage.
local function place(chunk, stage) return stage.selector == 'fresh_first' and -chunk.ordinal or chunk.ordinal end

-- Bring the indexes of these stages from a chunk's runs before to its runs now (none: it is freed).
local function index(t, chunk, now, stages)
  local before = chunk.before
  for k = 1, #stages do
    local i = stages[k]
    local stage, at = t.stages[i], t.config.pos[i]
    local key, had, has_now = stage.key.ready, has(before, at, 114), has(now, at, 114)
    if stage.by_unit then
      if had or has_now then
        local old, new = ready_units(t, chunk, before, i), ready_units(t, chunk, now, i)
        for u in pairs(old) do
          if not new[u] then zrem(t, key, chunk.id .. '#' .. u) end
        end
        for u, sig in pairs(new) do
          if not old[u] then zadd(t, key, ring(t, chunk, i, u, sig), chunk.id .. '#' .. u) end
        end
      end
      if stage.selector == 'prioritized' and #now == 0 then
        for u = 0, chunk.n / unit_rows(chunk, stage) - 1 do
          redis.call('HDEL', stage.key.priority, chunk.id .. '#' .. u)
        end
      end
    elseif has_now and not had then
      zadd(t, key, place(chunk, stage), chunk.id)
    elseif had and not has_now then
      zrem(t, key, chunk.id)
    end
    if stage.min_batch > 1 then
      if has_now and not had then
        zadd(t, stage.key.since, t.now, chunk.id)
        t.ageing = t.ageing or {}
        t.ageing[i] = true
      end
      if had and not has_now then zrem(t, stage.key.since, chunk.id) end
      local open = has(now, at, 119) or has(now, at, 99)
      local opened = has(before, at, 119) or has(before, at, 99)
      if open and not opened then zadd(t, stage.key.open, chunk.ordinal, chunk.id) end
      if opened and not open then zrem(t, stage.key.open, chunk.id) end
    end
  end
end

-- Drop the oldest dead letters beyond the table's limit.
local function bound_dead(t)
  local key = t.prefix .. KEY.dead
  while t.state[DEAD] > t.config.max_dead_rows do
    local member = redis.call('ZRANGE', key, 0, 0)[1]
    if not member then return end
    redis.call('ZREM', key, member)
    local id, first, count = string.match(member, '^(.*):(%d+):(%d+):%d+$')
    local chunk = chunk_of(t, id)
    if chunk then
      local rows = move(t, chunk, {tonumber(first), tonumber(count)}, 'drop', to_dropped)
      t.state[DEAD] = t.state[DEAD] - rows
    end
  end
end

-- Bring indexes and counters to a chunk's rows as they are now. Returns whether it is over, and the change whose counters are left
-- to bring, if any.
local function account(t, chunk)
  local before, runs = chunk.before, chunk.runs
  if runs == before and not chunk.dirty then return false end
  if runs[4] or before[4] or chunk.counted then
    tally(t, chunk)
    local over = is_over(t, chunk)
    if over or runs ~= before then index(t, chunk, over and NONE or runs, t.config.every) end
    return over
  end
  local change = change_of(t.config, before[3] or '', runs[3])
  local enters, leaves, others, id, alone = change.enters, change.leaves, change.others, chunk.id, not t.order[2]
  for k = 1, #enters do
    local key = enters[k].key.ready
    if alone then redis.call('ZADD', key, place(chunk, enters[k]), id) else zadd(t, key, place(chunk, enters[k]), id) end
  end
  for k = 1, #leaves do
    local key = leaves[k].key.ready
    if alone then redis.call('ZREM', key, id) else zrem(t, key, id) end
  end
  if others[1] then index(t, chunk, change.over and NONE or runs, others) end
  return change.over, change
end

-- Writes everything that a call changed, in one place: chunks, counters, wake tokens.
local function commit(t)
  local state, config, key = t.state, t.config, t.key
  if state[DEAD] > config.max_dead_rows then bound_dead(t) end
  local sets, size, gone, going, order = {nil, nil, nil, nil}, 0, nil, 0, t.order  -- made with room: a table grows slowly
  local common, rows = nil, 0  -- chunks of one call mostly change alike
  for k = 1, #order do
    local chunk = order[k]
    local over, change = account(t, chunk)
    if change then
      if change ~= common then
        if common then add_up(state, common.counters, rows) end
        common, rows = change, 0
      end
      rows = rows + chunk.n
    end
    if over then
      gone = gone or {nil, nil, nil, nil, nil, nil, nil, nil}
      going = add_keys(t, chunk, gone, going)
      state[BYTES] = state[BYTES] - chunk.bytes
      t.roomier = true
    elseif chunk.runs ~= chunk.before or chunk.dirty then
      sets[size + 1], sets[size + 2] = key.chunk .. chunk.id, pack_chunk(chunk)
      size = size + 2
    end
  end
  if common then add_up(state, common.counters, rows) end
  if t.zadd then
    for name, list in pairs(t.zadd) do in_parts('ZADD', name, list) end
  end
  if t.zrem then
    for name, list in pairs(t.zrem) do in_parts('ZREM', name, list) end
  end
  if gone then unlink(gone) end
  if t.ended then
    for label, rows in pairs(t.ended) do redis.call('HINCRBY', key.ended, label, rows) end
    t.roomier = true
  end
  wake(t)
  state[COMMITS] = state[COMMITS] + 1
  local packed = struct.pack(config.format, unpack(state, 1, config.fields))
  size = size + 2
  sets[size - 1], sets[size] = key.state, packed
  if size <= SOME then
    redis.call('MSET', unpack(sets, 1, size))
  else
    for from = 1, size, SOME do redis.call('MSET', unpack(sets, from, math.min(from + SOME - 1, size))) end
  end
  config.packed, config.state = packed, state
end

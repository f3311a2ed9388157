-- Transitions of rows, in memory: commit() writes them.

local CODES = {trained = 't', done = 'd', filtered = 'f', stale = 's', dead = 'x'}

-- A row that is there for the stages that need nothing more; one that ended, for the stages that want ended rows.
local function settled(config, sig)
  local live = string.byte(sig, 1) == 111
  for i, stage in ipairs(config.stages) do
    local at = config.pos[i]
    if string.byte(sig, at) == 119 then
      if stage.ended then
        if not live then sig = with(sig, at, 'r') end
      elseif live then
        local there = true
        for _, j in ipairs(stage.units) do
          if string.byte(sig, 2 + j) ~= 49 then there = false end
        end
        if there then sig = with(sig, at, stage.grouped and 'c' or 'r') end
      end
    end
  end
  return sig
end

local function all_done(config, sig)
  for i, stage in ipairs(config.stages) do
    if not stage.ended and string.byte(sig, config.pos[i]) ~= 97 then return false end
  end
  return true
end

local function to_present(config, sig, j) return settled(config, with(sig, 2 + j, '1')) end

local function to_joined(config, sig, i)
  local at = config.pos[i]
  if string.byte(sig, at) == 99 then return with(sig, at, 'r') end
end

local function to_leased(config, sig, i)
  local at = config.pos[i]
  local delivery = math.min(string.byte(sig, at + 1) + 1, FIRST + 40)
  return with(sig, at, 'l' .. string.char(delivery))
end

-- Done for stage i; a row that is done for every stage and still lives has ended.
local function to_done(config, sig, i)
  local at = config.pos[i]
  if string.byte(sig, at) ~= 108 then return nil end
  sig = with(sig, at, 'a')
  if string.byte(sig, 1) == 111 and string.byte(sig, 2) == FIRST and all_done(config, sig) then
    sig = settled(config, with(sig, 1, 'd'))
  end
  return sig
end

-- Given back without having been worked on: this delivery does not count.
local function to_released(config, sig, i)
  local at = config.pos[i]
  if string.byte(sig, at) ~= 108 then return nil end
  return with(sig, at, 'r' .. string.char(math.max(FIRST, string.byte(sig, at + 1) - 1)))
end

-- Given back to be delivered again; nil when it had all its deliveries.
local function to_redelivered(config, sig, i)
  local at, stage = config.pos[i], config.stages[i]
  if string.byte(sig, at) ~= 108 then return nil end
  if not stage.ended and string.byte(sig, at + 1) - FIRST >= stage.max_deliveries then return nil end
  return with(sig, at, 'r')
end

-- Used once more by stage i, and ready for it again.
local function to_used(config, sig, i)
  sig = with(sig, 2, string.char(string.byte(sig, 2) + 1))
  if string.byte(sig, config.pos[i]) == 108 then sig = with(sig, config.pos[i], 'r0') end
  return sig
end

-- Ended: `how` is {code, stage that ended it (0: none), 1 when that was a use}.
local function to_ended(config, sig, how)
  if string.byte(sig, 1) ~= 111 then return nil end
  sig = with(sig, 1, how[1])
  if how[3] == 1 then sig = with(sig, 2, string.char(string.byte(sig, 2) + 1)) end
  for i, stage in ipairs(config.stages) do
    local at = config.pos[i]
    if not stage.ended and string.byte(sig, at) ~= 97 then
      sig = with(sig, at, i == how[2] and how[1] ~= 'x' and 'a' or 's')
    end
  end
  return settled(config, sig)
end

-- What a stage made of the row is gone, as stage `how[1]`, which has it leased, found out: `how` is {that stage, the stage that made
-- it, its units}. It is made again; stages that are done with it stay so.
local function to_lost(config, sig, how)
  local at, maker = config.pos[how[1]], config.pos[how[2]]
  if string.byte(sig, 1) ~= 111 or string.byte(sig, at) ~= 108 then return nil end
  sig = with(sig, at, 'w' .. string.char(math.max(FIRST, string.byte(sig, at + 1) - 1)))
  for _, j in ipairs(how[3]) do sig = with(sig, 2 + j, '0') end
  for i, stage in ipairs(config.stages) do
    local char = string.byte(sig, config.pos[i])
    if not stage.ended and (char == 114 or char == 99) then
      for _, j in ipairs(stage.units) do
        if string.byte(sig, 2 + j) ~= 49 then sig = with(sig, config.pos[i], 'w') end
      end
    end
  end
  if string.byte(sig, maker) == 97 then sig = with(sig, maker, 'w0') end
  return settled(config, sig)
end

-- Alive again after it was dead: ready once more for all that it is not done with.
local function to_retried(config, sig)
  if string.byte(sig, 1) ~= 120 then return nil end
  sig = with(sig, 1, 'o')
  for i, stage in ipairs(config.stages) do
    local at = config.pos[i]
    if stage.ended then
      sig = with(sig, at, 'w0')
    elseif string.byte(sig, at) == 115 then
      sig = with(sig, at, 'w0')
    end
  end
  return settled(config, sig)
end

local function to_dropped(_, sig)
  if string.byte(sig, 1) == 120 then return with(sig, 1, 'X') end
end

local function to_durable(_, sig)
  if string.byte(sig, 1) == 116 then return with(sig, 1, 'T') end
end

local function to_settled(config, sig) return settled(config, sig) end

-- Complete units become ready when no live sibling still waits: ready + terminal = expected.
local function join(t, chunk)
  for _, i in ipairs(t.config.grouped) do
    local at, stage = t.config.pos[i], t.stages[i]
    if #chunk.runs == 3 and not stage.group_deadline_ms then
      if string.byte(chunk.runs[3], at) == 99 then move(t, chunk, all_rows(chunk), stage.moves.join, to_joined, i) end
    elseif has(chunk.runs, at, 99) or stage.group_deadline_ms then
      local size = unit_rows(chunk, stage)
      local complete, blocked = {}, {}
      each_run(chunk, all_rows(chunk), function(sig, _, begin, rows)
        local char = string.byte(sig, at)
        local set = char == 99 and complete or char == 119 and string.byte(sig, 1) == 111 and blocked
        if set then
          for u = math.floor(begin / size), math.floor((begin + rows - 1) / size) do set[u] = true end
        end
      end)
      local joined = {}
      for u = 0, chunk.n / size - 1 do
        if complete[u] and not blocked[u] then joined[#joined + 1], joined[#joined + 2] = u * size, size end
        if stage.group_deadline_ms then
          local key, member = stage.key.groups, chunk.id .. '#' .. u
          if complete[u] and blocked[u] then
            local due = t.now + stage.group_deadline_ms
            redis.call('ZADD', key, 'NX', due, member)
            t.state[DUE] = math.min(t.state[DUE], due)
          else
            redis.call('ZREM', key, member)
          end
        end
      end
      if joined[1] then move(t, chunk, joined, stage.moves.join, to_joined, i) end
    end
  end
end

-- End live rows. `final` is {state, label, reason, step}; `i` the stage that ends them (0: none); `use` 1 when they were
-- trained on just now. A row that was trained on before ends as trained whatever ends it.
local function end_rows(t, chunk, ranges, final, i, use)
  local by_uses = {}
  each_run(chunk, ranges, function(sig, _, from, rows)
    if string.byte(sig, 1) ~= 111 then return end
    local uses = string.byte(sig, 2) - FIRST + use
    local list = by_uses[uses] or {}
    by_uses[uses] = list
    list[#list + 1], list[#list + 2] = from, rows
  end)
  for uses, list in pairs(by_uses) do
    local state, label, step = final.state, final.label, final.step
    if uses > 0 then
      state, label = 'trained', 'trained'
      if t.config.max_uses > 1 then
        step, label = math.max(step, chunk.last), 'trained(' .. uses .. ')'
        chunk.last, chunk.dirty = step, true
      end
    end
    local code = CODES[state]
    if code == 't' and step < t.state[DURABLE] then code = 'T' end
    if code == 'x' and t.config.max_dead_rows == 0 then code = 'X' end
    move(t, chunk, list, table.concat({'end', code, i, use}), to_ended, {code, i, use})
    for k = 1, #list, 2 do
      local from, rows = list[k], list[k + 1]
      note_end(t, chunk, from, rows, state, label, step, final.reason)
      local member = chunk.id .. ':' .. from .. ':' .. rows
      if code == 't' then redis.call('ZADD', t.prefix .. KEY.trained, step, member) end
      if code == 'x' then
        redis.call('ZADD', t.prefix .. KEY.dead, t.now, member .. ':' .. i)
        t.state[DEAD] = t.state[DEAD] + rows
      end
    end
  end
  if next(by_uses) then join(t, chunk) end
end

-- Stage i trained on rows for the (`use` + 1)-th time, in this step. Rows that were used more often already (a repeated
-- redo) are left alone; the last use ends them.
local function use_rows(t, chunk, ranges, i, step, use)
  local again, last = {}, {}
  each_run(chunk, ranges, function(sig, _, from, rows)
    local uses = string.byte(sig, 2) - FIRST
    if string.byte(sig, 1) ~= 111 or uses > use then return end
    local list = uses + 1 < t.config.max_uses and again or last
    list[#list + 1], list[#list + 2] = from, rows
  end)
  if again[1] then
    chunk.last, chunk.dirty = math.max(chunk.last, step), true
    move(t, chunk, again, 'use' .. i, to_used, i)
  end
  if last[1] then end_rows(t, chunk, last, {state = 'trained', label = 'trained', reason = '', step = step}, i, 1) end
end

local function ack_rows(t, chunk, i, ranges)
  move(t, chunk, ranges, t.stages[i].moves.done, to_done, i)
  if t.config.max_uses == 1 then return end
  local over = {}  -- rows that were trained on, and that every stage is done with: they end as trained
  each_run(chunk, ranges, function(sig, _, from, rows)
    if string.byte(sig, 1) == 111 and string.byte(sig, 2) > FIRST and all_done(t.config, sig) then
      over[#over + 1], over[#over + 2] = from, rows
    end
  end)
  if over[1] then end_rows(t, chunk, over, {state = 'done', label = 'done', reason = '', step = -1}, i, 0) end
end

-- Rows among these that stage i has leased.
local function leased_rows(t, chunk, i, ranges)
  local list, at = {}, t.config.pos[i]
  each_run(chunk, ranges, function(sig, _, from, rows)
    if string.byte(sig, at) == 108 then list[#list + 1], list[#list + 2] = from, rows end
  end)
  return list
end

-- Give leased rows back: `counted` ones end as dead when they had all their deliveries.
local function give_back(t, chunk, i, ranges, counted, reason)
  if not counted then
    add_to(t, i, TAKEN, -move(t, chunk, ranges, 'release' .. i, to_released, i))
    return
  end
  local back = move(t, chunk, ranges, 'again' .. i, to_redelivered, i)
  t.state[REDELIVERED] = t.state[REDELIVERED] + back
  add_to(t, i, TAKEN, -back)
  local spent = leased_rows(t, chunk, i, ranges)
  if spent[1] then end_rows(t, chunk, spent, {state = 'dead', label = reason[1], reason = reason[2], step = -1}, i, 0) end
end

-- Leases: `<client>.<slot>` and a serial; the slot is the field, so that one write both ends a lease and remembers which
-- call of its owner did (the same call, repeated because its answer was lost, is told so).

-- The lease; nil and the record of another live one when its slot holds that.
local function lease_of(t, slot, serial)
  local packed = redis.call('HGET', t.key.leases, slot)
  if not packed then return nil end
  local f = take_kept(packed) or cmsgpack.unpack(packed)
  if f[1] ~= serial then return nil, f[2] > 0 and f or nil end
  if f[2] == 0 then return {over = true, call = f[4]} end
  return {slot = slot, serial = f[1], due = f[2], stage = f[3], worker = f[4], fields = f}
end

local function end_lease(t, held, call)
  local record = {held.serial, 0, t.now, call}
  local packed = cmsgpack.pack(record)
  redis.call('HSET', t.key.leases, held.slot, packed)
  keep(packed, record)
end

local FORGET_MS = 3600000  -- so long an ended lease answers repeated calls

-- Whatever time alone brings about: leases and groups that are over. Returns the number of leases. At most `most` of
-- each are done in one call: a function's time is everybody's stall.
local function expire(t, most)
  local state = t.state
  if t.now < state[DUE] then return 0 end
  local due, leases = math.huge, 0
  local all = redis.call('HGETALL', t.prefix .. KEY.leases)
  for k = 1, #all, 2 do
    local f = cmsgpack.unpack(all[k + 1])
    if f[2] == 0 then
      if f[3] < t.now - FORGET_MS then redis.call('HDEL', t.prefix .. KEY.leases, all[k]) end
    elseif f[2] > t.now or leases == most then
      due = math.min(due, f[2])
    else
      leases = leases + 1
      redis.call('HDEL', t.prefix .. KEY.leases, all[k])
      local reason = {'dead(lease expired)', 'lease expired\nlast worker ' .. f[4]}
      each_chunk(t, f, 5, function(chunk, ranges) give_back(t, chunk, f[3], ranges, true, reason) end)
    end
  end
  for _, i in ipairs(t.config.timed) do
    local key = t.prefix .. KEY.groups .. i
    for _, member in ipairs(redis.call('ZRANGEBYSCORE', key, '-inf', t.now, 'LIMIT', 0, most)) do
      redis.call('ZREM', key, member)
      local id, u = string.match(member, '^(.*)#(%d+)$')
      local chunk = chunk_of(t, id)
      if chunk then
        local size, at = unit_rows(chunk, t.stages[i]), t.config.pos[i]
        local missing, complete = {}, 0
        each_run(chunk, {u * size, size}, function(sig, _, from, rows)
          local char = string.byte(sig, at)
          if string.byte(sig, 1) ~= 111 then return end
          if char ~= 119 then complete = complete + rows end
          if char == 119 then missing[#missing + 1], missing[#missing + 2] = from, rows end
        end)
        if missing[1] and complete < t.stages[i].group_min then missing = {u * size, size} end
        local final = {state = 'dead', label = 'dead(group deadline)', reason = 'group deadline', step = -1}
        end_rows(t, chunk, missing, final, 0, 0)
      end
    end
    local head = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')
    if head[2] then due = math.min(due, tonumber(head[2])) end
  end
  state[DUE] = due
  return leases
end

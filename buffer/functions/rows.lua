-- Transitions of rows, in memory: commit() writes them.

local CODES = {trained = 't', done = 'd', filtered = 'f', stale = 's', dead = 'x'}

-- Rows that one claim takes together: 1, a group or the whole chunk.
local function unit_rows(chunk, stage)
  if stage.scope == 'group' then return chunk.group end
  if stage.scope == 'chunk' then return chunk.n end
  return 1
end

-- Make waiting rows of one stage ready, where all their columns are there and no sibling of theirs still misses some.
local function settle_stage(t, chunk, i, first, count)
  local stage = t.stages[i]
  local size = unit_rows(chunk, stage)
  if size > 1 then
    local stop = math.min(chunk.n, math.ceil((first + count) / size) * size)
    first = math.floor(first / size) * size
    count = stop - first
  end
  local names = {'s' .. i, 'e'}
  for _, unit in ipairs(stage.needs) do names[#names + 1] = 'u' .. unit end
  local candidates, blocked, any_blocked = {}, {}, false
  each_run(chunk, names, first, count, function(from, rows, chars)
    if chars[1] ~= 'w' or chars[2] ~= 'o' then return end
    for k = 3, #chars do
      if chars[k] ~= '1' then
        if size > 1 then
          for g = math.floor(from / size), math.floor((from + rows - 1) / size) do blocked[g] = true end
          any_blocked = true
        end
        return
      end
    end
    candidates[#candidates + 1] = {from, rows}
  end)
  local function ready(from, rows)
    set_rows(chunk, 's' .. i, from, rows, 'r')
    bump(t, 'w' .. i, -rows)
    bump(t, 'r' .. i, rows)
  end
  for _, run in ipairs(candidates) do
    local from, stop = run[1], run[1] + run[2]
    if not any_blocked then
      ready(from, run[2])
    else
      while from < stop do
        local g = math.floor(from / size)
        local to = math.min(stop, (g + 1) * size)
        if not blocked[g] then ready(from, to - from) end
        from = to
      end
    end
  end
end

local function settle(t, chunk, first, count)
  for i, stage in ipairs(t.stages) do
    if not stage.ended and string.find(vector(chunk, 's' .. i), 'w', 1, true) then settle_stage(t, chunk, i, first, count) end
  end
end

-- One stage's view of rows that just ended; `actor` is the stage that ended them.
local function leave_stage(t, chunk, i, first, count, actor)
  local name = 's' .. i
  each_run(chunk, {name}, first, count, function(from, rows, chars)
    local was = chars[1]
    if was ~= 'w' and was ~= 'r' and was ~= 'l' then return end
    local becomes = t.stages[i].ended and 'r' or (i == actor and 'a' or 's')
    bump(t, was .. i, -rows)
    if becomes ~= 's' then bump(t, becomes .. i, rows) end
    set_rows(chunk, name, from, rows, becomes)
  end)
end

-- End the live rows of the range. Rows that ended before keep their end state.
local function end_rows(t, chunk, first, count, final, actor)
  local code = CODES[final.state]
  each_run(chunk, {'e'}, first, count, function(from, rows, chars)
    if chars[1] ~= 'o' then return end
    if code == 't' then
      t.durable = t.durable or state(t, 'durable')
      if final.step < t.durable then
        code = 'T'
      else
        redis.call('ZADD', t.prefix .. KEY.trained, final.step, chunk.id .. ':' .. from .. ':' .. rows)
      end
    end
    set_rows(chunk, 'e', from, rows, code)
    bump(t, 'live', -rows)
    t.ended[final.label] = (t.ended[final.label] or 0) + rows
    local why = from .. US .. rows .. US .. final.state .. US .. final.step .. US .. final.reason .. RS
    set_field(chunk, 'why', (chunk.fields.why or '') .. why)
    for i = 1, #t.stages do leave_stage(t, chunk, i, from, rows, actor) end
  end)
  settle(t, chunk, first, count)
end

-- Rows that every ordinary stage is done with end as `done`, when nobody gave them another end state.
local function end_if_all_done(t, chunk, first, count)
  local names = {'e'}
  for i, stage in ipairs(t.stages) do
    if not stage.ended then
      if not string.find(vector(chunk, 's' .. i), 'a', 1, true) then return end
      names[#names + 1] = 's' .. i
    end
  end
  each_run(chunk, names, first, count, function(from, rows, chars)
    if chars[1] ~= 'o' then return end
    for k = 2, #chars do
      if chars[k] ~= 'a' then return end
    end
    end_rows(t, chunk, from, rows, {state = 'done', label = 'done', reason = '', step = -1}, 0)
  end)
end

local function ack_rows(t, chunk, i, first, count)
  each_run(chunk, {'s' .. i}, first, count, function(from, rows, chars)
    if chars[1] ~= 'l' then return end
    set_rows(chunk, 's' .. i, from, rows, 'a')
    bump(t, 'l' .. i, -rows)
    bump(t, 'a' .. i, rows)
  end)
  if not t.stages[i].ended then end_if_all_done(t, chunk, first, count) end
end

-- Give leased rows back: `counted` ones end as dead when they had all their deliveries.
local function give_back(t, chunk, i, first, count, counted, reason)
  local stage = t.stages[i]
  each_run(chunk, {'s' .. i, 'd' .. i}, first, count, function(from, rows, chars)
    if chars[1] ~= 'l' then return end
    local deliveries = string.byte(chars[2]) - FIRST_DELIVERY
    if counted and not stage.ended and deliveries >= stage.max_deliveries then
      end_rows(t, chunk, from, rows, {state = 'dead', label = reason[1], reason = reason[2], step = -1}, 0)
      return
    end
    set_rows(chunk, 's' .. i, from, rows, 'r')
    bump(t, 'l' .. i, -rows)
    bump(t, 'r' .. i, rows)
    if counted then
      bump(t, 'redelivered', rows)
    else
      set_rows(chunk, 'd' .. i, from, rows, string.char(FIRST_DELIVERY + math.max(0, deliveries - 1)))
    end
  end)
end

local function lease_of(t, lease)
  local packed = redis.call('HGET', t.prefix .. KEY.leases, lease)
  if not packed then return nil end
  local record = cmsgpack.unpack(packed)
  return {stage = record[1], worker = record[2], ranges = record[3]}
end

local function each_range(t, ranges, fn)
  for k = 1, #ranges, 3 do
    local chunk = chunk_of(t, ranges[k])
    if chunk then fn(chunk, tonumber(ranges[k + 1]), tonumber(ranges[k + 2])) end
  end
end

local function drop_lease(t, lease)
  redis.call('HDEL', t.prefix .. KEY.leases, lease)
  redis.call('ZREM', t.prefix .. KEY.deadlines, lease)
end

-- Redeliver the rows of at most `most` leases whose time is over; returns how many leases that were.
local function expire_due(t, most)
  local due = redis.call('ZRANGEBYSCORE', t.prefix .. KEY.deadlines, '-inf', now_ms(), 'LIMIT', 0, most)
  for _, lease in ipairs(due) do
    local held = lease_of(t, lease)
    drop_lease(t, lease)
    if held then
      local reason = {'dead(lease expired)', 'lease expired; last worker ' .. held.worker}
      each_range(t, held.ranges, function(chunk, first, count)
        give_back(t, chunk, held.stage, first, count, true, reason)
      end)
    end
  end
  return #due
end

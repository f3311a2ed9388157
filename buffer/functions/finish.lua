-- Ending claims and rows. `client` and `serial` make a repeated call (its reply was lost) a no-op.

-- Runs change(t, lease) once under a valid lease: {"ok", ...} or {"fenced"}.
local function under_lease(keys, args, change)
  local t = open_table(keys)
  if not t then return {'unknown'} end
  if applied(t, args[1], args[2]) then return {'ok'} end
  local held = lease_of(t, args[3])
  if not held then return {'fenced'} end
  local reply = change(t, held) or {'ok'}
  mark_applied(t, args[1], args[2])
  commit(t)
  return reply
end

-- ack(client, serial, lease)
register('ack', function(keys, args)
  return under_lease(keys, args, function(t, held)
    each_range(t, held.ranges, function(chunk, first, count) ack_rows(t, chunk, held.stage, first, count) end)
    drop_lease(t, args[3])
  end)
end, 'allow-oom')

-- give_back(client, serial, lease, 1 to count the delivery, label when dead, reason)
register('give_back', function(keys, args)
  return under_lease(keys, args, function(t, held)
    drop_lease(t, args[3])
    each_range(t, held.ranges, function(chunk, first, count)
      give_back(t, chunk, held.stage, first, count, args[4] == '1', {args[5], args[6]})
    end)
  end)
end, 'allow-oom')

-- extend(lease): {"ok"} or {"fenced"}.
register('extend', function(keys, args)
  local t = open_table(keys)
  if not t then return {'unknown'} end
  local held = lease_of(t, args[1])
  if not held then return {'fenced'} end
  redis.call('ZADD', t.prefix .. KEY.deadlines, 'XX', now_ms() + t.stages[held.stage].lease_ms, args[1])
  return {'ok'}
end, 'allow-oom')

-- finish(client, serial, lease, state, label, reason, step, {chunk, first, count}...): {"ok", 1 when the claim is over}.
-- Rows that this lease does not hold any more are left alone. No ranges: all rows of the claim.
register('finish', function(keys, args)
  return under_lease(keys, args, function(t, held)
    local ranges = held.ranges
    if #args > 7 then
      ranges = {}
      for k = 8, #args do ranges[#ranges + 1] = args[k] end
    end
    local final = {state = args[4], label = args[5], reason = args[6], step = tonumber(args[7])}
    each_range(t, ranges, function(chunk, first, count)
      if t.stages[held.stage].ended then
        ack_rows(t, chunk, held.stage, first, count)
        return
      end
      each_run(chunk, {'s' .. held.stage}, first, count, function(from, rows, chars)
        if chars[1] == 'l' then end_rows(t, chunk, from, rows, final, held.stage) end
      end)
    end)
    local over = true
    each_range(t, held.ranges, function(chunk, first, count)
      each_run(chunk, {'s' .. held.stage}, first, count, function(_, _, chars)
        if chars[1] == 'l' then over = false end
      end)
    end)
    if over then drop_lease(t, args[3]) end
    return {'ok', over and 1 or 0}
  end)
end, 'allow-oom')

-- finish_logged(stage index, step, {chunk, producer, sequence, first, count}...): {"ok"}, or {"conflict", chunk} when the
-- rows ended otherwise. Freed chunks are past; rows of chunks that are still to come are noted.
register('finish_logged', function(keys, args)
  local t = open_table(keys)
  if not t then return {'unknown'} end
  local stage, step = tonumber(args[1]), tonumber(args[2])
  local conflict
  for k = 3, #args, 5 do
    local chunk = chunk_of(t, args[k])
    if chunk then
      each_run(chunk, {'e'}, tonumber(args[k + 3]), tonumber(args[k + 4]), function(_, _, chars)
        if not string.find(chars[1], '[otT]') then conflict = args[k] end
      end)
    end
  end
  if conflict then return {'conflict', conflict} end
  local final = {state = 'trained', label = 'trained', reason = '', step = step}
  for k = 3, #args, 5 do
    local chunk = chunk_of(t, args[k])
    if chunk then
      end_rows(t, chunk, tonumber(args[k + 3]), tonumber(args[k + 4]), final, stage)
    else
      local mark = redis.call('HGET', t.prefix .. KEY.marks, args[k + 1])
      if not mark or tonumber(mark) < tonumber(args[k + 2]) then
        local at, note = t.prefix .. KEY.logged, table.concat({stage, args[k + 3], args[k + 4], step}, ':') .. ';'
        local noted = redis.call('HGET', at, args[k]) or ''
        if not string.find(noted, note, 1, true) then redis.call('HSET', at, args[k], noted .. note) end
      end
    end
  end
  commit(t)
  return {'ok'}
end, 'allow-oom')

-- advance(step): a checkpoint covers the step. {"ok", chunk ranges still to do}: the client repeats until 0.
register('advance', function(keys, args)
  local t = open_table(keys)
  if not t then return {'unknown'} end
  local step, at = tonumber(args[1]), t.prefix .. KEY.trained
  if step + 1 > state(t, 'durable') then redis.call('HSET', t.prefix .. KEY.state, 'durable', step + 1) end
  local members = redis.call('ZRANGEBYSCORE', at, '-inf', step, 'LIMIT', 0, SOME)
  for _, member in ipairs(members) do
    local id, first, count = string.match(member, '^(.*):(%d+):(%d+)$')
    local chunk = chunk_of(t, id)
    if chunk then
      each_run(chunk, {'e'}, tonumber(first), tonumber(count), function(from, rows, chars)
        if chars[1] == 't' then set_rows(chunk, 'e', from, rows, 'T') end
      end)
    end
  end
  if #members > 0 then redis.call('ZREM', at, unpack(members)) end
  commit(t)
  return {'ok', redis.call('ZCOUNT', at, '-inf', step)}
end, 'allow-oom')

-- expire(): {"ok", leases that were over}.
register('expire', function(keys)
  local t = open_table(keys)
  if not t then return {'unknown'} end
  local leases = expire_due(t, 64)
  commit(t)
  return {'ok', leases}
end, 'allow-oom')

-- recover(worker, prefix of its own leases): gives back what earlier processes of this worker hold, counted.
-- {"ok", leases}.
register('recover', function(keys, args)
  local t = open_table(keys)
  if not t then return {'unknown'} end
  local all, leases = redis.call('HGETALL', t.prefix .. KEY.leases), 0
  for k = 1, #all, 2 do
    local lease = all[k]
    local held = lease_of(t, lease)
    if held.worker == args[1] and string.sub(lease, 1, #args[2]) ~= args[2] then
      drop_lease(t, lease)
      leases = leases + 1
      local reason = {'dead(worker ended)', 'worker ended while it held the row; last worker ' .. held.worker}
      each_range(t, held.ranges, function(chunk, first, count)
        give_back(t, chunk, held.stage, first, count, true, reason)
      end)
    end
  end
  commit(t)
  return {'ok', leases}
end, 'allow-oom')

-- forget(client): the client ends and repeats nothing any more.
register('forget', function(keys, args)
  return {'ok', redis.call('HDEL', keys[1] .. KEY.applied, args[1])}
end, 'allow-oom')

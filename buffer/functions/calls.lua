-- Calls, desired states and incarnations of one run. KEYS[1] is the run's prefix R.
--
--   R controller    hash: epoch, owner (mark of the process, nonce), until_ms (lease), fingerprint (of the schema)
--   R incarnations  hash: "role:rank" -> incarnation
--   R calls         hash: call id -> the call (msgpack)
--   R call-heads    hash: call id -> msgpack {digest of role, method, ranks and arguments, role, ranks}
--   R queue:<role>:<rank>  list: call ids without a result of this rank, oldest first
--   R results       hash: call id US rank -> result (msgpack); kept for the run, the re-entrant loop reads them
--   R desired       hash: role -> msgpack {version, desired state (msgpack)}
--   R notes         hash: name -> msgpack map, for other processes to read
--   R orders        list: operators' orders (msgpack), oldest first
--   R home          string: mark of the run folder; no function uses it

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function epoch_of(run)
  return tonumber(redis.call('HGET', run .. KEY.controller, 'epoch') or 0)
end

local function record_of(run, id, head, call)
  local reply = {'ok', call or redis.call('HGET', run .. KEY.calls, id)}
  for _, rank in ipairs(head[3]) do
    reply[#reply + 1] = redis.call('HGET', run .. KEY.results, id .. US .. rank)
  end
  return reply
end

-- submit(id, digest, role, epoch, call, ranks...): {"ok", the call as it was first submitted, result or false of each
-- of its ranks...}, {"diverged"}, or {"fenced", newest epoch}.
register('submit', function(keys, args)
  local run, id = keys[1], args[1]
  local epoch = epoch_of(run)
  if tonumber(args[4]) < epoch then return {'fenced', epoch} end
  local head = redis.call('HGET', run .. KEY.call_heads, id)
  if head then
    head = cmsgpack.unpack(head)
    return head[1] == args[2] and record_of(run, id, head) or {'diverged'}
  end
  head = {args[2], args[3], {}}
  for k = 6, #args do head[3][k - 5] = args[k] end
  redis.call('HSET', run .. KEY.calls, id, args[5])
  redis.call('HSET', run .. KEY.call_heads, id, cmsgpack.pack(head))
  for _, rank in ipairs(head[3]) do redis.call('RPUSH', run .. KEY.queue .. args[3] .. ':' .. rank, id) end
  return record_of(run, id, head, args[5])
end, 'allow-oom')

-- next(role, rank): {"ok", call} or {"none"}.
register('next', function(keys, args)
  local id = redis.call('LINDEX', keys[1] .. KEY.queue .. args[1] .. ':' .. args[2], 0)
  if not id then return {'none'} end
  return {'ok', redis.call('HGET', keys[1] .. KEY.calls, id)}
end, 'no-writes')

local function store_result(run, id, rank, role, result)
  local stored = redis.call('HSETNX', run .. KEY.results, id .. US .. rank, result)
  if stored == 1 then redis.call('LREM', run .. KEY.queue .. role .. ':' .. rank, 1, id) end
  return {'ok', stored}
end

local function head_with(run, id, rank)
  local head = redis.call('HGET', run .. KEY.call_heads, id)
  if not head then return nil end
  head = cmsgpack.unpack(head)
  for _, member in ipairs(head[3]) do if member == rank then return head end end
  return nil
end

-- complete(id, rank, incarnation, result): {"ok", 1 when stored now}, {"fenced", newest incarnation}, {"missing"}.
register('complete', function(keys, args)
  local run, id, rank = keys[1], args[1], args[2]
  local head = head_with(run, id, rank)
  if not head then return {'missing'} end
  local newest = tonumber(redis.call('HGET', run .. KEY.incarnations, head[2] .. ':' .. rank) or 0)
  if tonumber(args[3]) < newest then return {'fenced', newest} end
  return store_result(run, id, rank, head[2], args[4])
end, 'allow-oom')

-- release(id, rank, epoch, result): the controller's result for a rank whose worker is not there; {"ok", 1 when stored
-- now}, {"fenced", newest epoch}, {"missing"}.
register('release', function(keys, args)
  local run, id, rank = keys[1], args[1], args[2]
  local epoch = epoch_of(run)
  if tonumber(args[3]) < epoch then return {'fenced', epoch} end
  local head = head_with(run, id, rank)
  return head and store_result(run, id, rank, head[2], args[4]) or {'missing'}
end, 'allow-oom')

-- look(id): {"ok", call, result or false of each rank...} or {"none"}.
register('look', function(keys, args)
  local head = redis.call('HGET', keys[1] .. KEY.call_heads, args[1])
  return head and record_of(keys[1], args[1], cmsgpack.unpack(head)) or {'none'}
end, 'no-writes')

-- want(role, version, epoch, desired): {"ok"}, {"fenced", newest epoch} or {"older", stored version}.
register('want', function(keys, args)
  local epoch = epoch_of(keys[1])
  if tonumber(args[3]) < epoch then return {'fenced', epoch} end
  local stored = redis.call('HGET', keys[1] .. KEY.desired, args[1])
  if stored then
    local version = cmsgpack.unpack(stored)[1]
    if tonumber(args[2]) < version then return {'older', version} end
  end
  redis.call('HSET', keys[1] .. KEY.desired, args[1], cmsgpack.pack({tonumber(args[2]), args[4]}))
  return {'ok'}
end, 'allow-oom')

-- wanted(role): {"ok", desired} or {"none"}.
register('wanted', function(keys, args)
  local stored = redis.call('HGET', keys[1] .. KEY.desired, args[1])
  if not stored then return {'none'} end
  return {'ok', cmsgpack.unpack(stored)[2]}
end, 'no-writes')

-- note(name, value, epoch where one fences): {"ok"} or {"fenced", newest epoch}. noted(name): {"ok", value} or {"none"}.
register('note', function(keys, args)
  local epoch = epoch_of(keys[1])
  if tonumber(args[3] or epoch) < epoch then return {'fenced', epoch} end
  redis.call('HSET', keys[1] .. KEY.notes, args[1], args[2])
  return {'ok'}
end, 'allow-oom')

register('noted', function(keys, args)
  local value = redis.call('HGET', keys[1] .. KEY.notes, args[1])
  if not value then return {'none'} end
  return {'ok', value}
end, 'no-writes')

-- order(order): {"ok", its number}. orders(after): {"ok", order...}.
register('order', function(keys, args) return {'ok', redis.call('RPUSH', keys[1] .. KEY.orders, args[1])} end, 'allow-oom')

register('orders', function(keys, args)
  return {'ok', unpack(redis.call('LRANGE', keys[1] .. KEY.orders, args[1], tonumber(args[1]) + SOME - 1))}
end, 'no-writes')

-- Whether two processes may work on one run. The part of a fingerprint before its first comma (the columns) is the
-- run's for good; the rest (versions, user code) is the living controller's.
local function fits(fingerprint, known, living)
  if not known or known == fingerprint then return true end
  return not living and string.match(known, '^[^,]*') == string.match(fingerprint, '^[^,]*')
end

-- join(role, rank, fingerprint, nonce): {"ok", incarnation} or {"schema", theirs}. The same nonce joins once.
register('join', function(keys, args)
  local run, who = keys[1], args[1] .. ':' .. args[2]
  local controller = run .. KEY.controller
  local theirs = redis.call('HGET', controller, 'fingerprint')
  local living = tonumber(redis.call('HGET', controller, 'until_ms') or 0) > now_ms()
  if not fits(args[3], theirs, living) then return {'schema', theirs} end
  local at = run .. KEY.incarnations
  if redis.call('HGET', at, who .. ':nonce') == args[4] then return {'ok', tonumber(redis.call('HGET', at, who))} end
  redis.call('HSETNX', controller, 'fingerprint', args[3])
  redis.call('HSET', at, who .. ':nonce', args[4])
  return {'ok', redis.call('HINCRBY', at, who, 1)}
end, 'allow-oom')

-- begin_epoch(fingerprint, lease_ms, owner, ended): {"ok", epoch}, {"second", milliseconds left, owner} or
-- {"schema", theirs}. The lease of the owner `ended` counts as over: its process is known to be gone.
register('begin_epoch', function(keys, args)
  local run, now = keys[1], now_ms()
  local at = run .. KEY.controller
  local theirs = redis.call('HGET', at, 'fingerprint')
  if not fits(args[1], theirs, false) then return {'schema', theirs} end
  local owner = redis.call('HGET', at, 'owner')
  if owner == args[3] then return {'ok', epoch_of(run)} end
  local left = tonumber(redis.call('HGET', at, 'until_ms') or 0) - now
  if left > 0 and owner ~= args[4] then return {'second', left, owner} end
  redis.call('HSET', at, 'fingerprint', args[1], 'owner', args[3], 'until_ms', now + tonumber(args[2]))
  return {'ok', redis.call('HINCRBY', at, 'epoch', 1)}
end, 'allow-oom')

-- renew_epoch(epoch, lease_ms): {"ok"} or {"fenced", newest epoch}. A lease of 0 ms gives it back. A server that came
-- back older than the epoch learns it again.
register('renew_epoch', function(keys, args)
  local epoch, lease_ms = epoch_of(keys[1]), tonumber(args[2])
  if tonumber(args[1]) < epoch then return {'fenced', epoch} end
  local until_ms = lease_ms > 0 and now_ms() + lease_ms or 0
  redis.call('HSET', keys[1] .. KEY.controller, 'epoch', args[1], 'until_ms', until_ms)
  return {'ok'}
end, 'allow-oom')

-- controller(): {"ok", newest epoch, milliseconds that its lease is still live}.
register('controller', function(keys)
  local left = tonumber(redis.call('HGET', keys[1] .. KEY.controller, 'until_ms') or 0) - now_ms()
  return {'ok', epoch_of(keys[1]), math.max(0, left)}
end, 'no-writes')
